"""A hint: the KV of these tokens is needed soon. Its pages in a tier are copied to the pool before the turn.

The pages are then cached as the newest pages, so they may be evicted again. They take the place of cached pages only:
no row and no session gives way.
"""

from rollout.engine.kv.allocator import PageAllocator
from rollout.engine.kv.prefixes import KnownPages
from rollout.engine.kv.tier import TierPrefix
from rollout.engine.messages.prompts import Prompt


def prefetch(allocator: PageAllocator, prompt: Prompt, version: int, edition: int, spare: int) -> int:
    """Begin to copy the known beginning of a prompt from a tier, and leave `spare` pages available.

    Returns how many of its first tokens have their KV in the pool, or on the way there: 0 for models with states, which
    cannot use pages alone. Do not call it while the pool's memory is given back.
    """
    prefixes, pool, tier, size = allocator.prefixes, allocator.pool, allocator.tier, allocator.page_size
    if not prefixes.cache or prefixes.has_states:
        return 0
    oldest = version - prefixes.max_age
    begin = KnownPages([], prefixes.no_keys(version, edition))
    known = prefixes.known_pages(prompt.content, begin, len(prompt) // size, oldest)
    pages, keys = known
    names, most = [*keys], len(keys) * size
    for key, end in prefixes.find_end(prompt.content, keys, len(prompt), oldest):
        names.append(key)
        pages.append(pool.find(key, oldest))
        most = end
        break
    here = len(known.in_pool)
    for page in pages[:here]:  # they are used now, so they are evicted last, the end before the beginning
        pool.retain(page)
    fetched = pages[here : here + _fitting(allocator, pages[here:], spare)]
    if fetched:
        prefix = TierPrefix(pages[:here], names[here : here + len(fetched)])
        fetched = fetched if tier.fetch(allocator, prefix, oldest, spare) else []
    for page in reversed(pages[:here]):
        pool.release(page)
    return min((here + len(fetched)) * size, most)


def _fitting(allocator: PageAllocator, pages: list[int], spare: int) -> int:
    """Number of first pages for which the pool has room: no session gives way, and no page that a tier has to copy.

    0 in the list: a page in a tier.
    """
    pool = allocator.pool
    room = pool.available - allocator.tier.writing - spare
    for index, page in enumerate(pages):
        room -= pool.refs[page] == 0
        if room < 0:
            return index
    return len(pages)
