"""Asks a vision-language model for places in a picture, so that the answer is always one that can be drawn.

    rollout serve MODEL --images &
    PYTHONPATH=. python scripts/find_in_picture.py tcp://127.0.0.1:5757 MODEL street.png --ask "all cars"

`--skill point` asks for one point, `detect` for objects with their sizes, `segment` for an outline. The grammars of
`scripts.spatial` let the model write nothing else, so an untrained model answers in the right form, too.
Each answer is a line of JSON with places in pixels; `--out` gets the picture with all answers drawn into it.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw
from transformers import AutoProcessor

from scripts import spatial
from trainer_bridge import RolloutClient, chat_prompt

Place = tuple[float, ...]  # x, y and, of an object, its size
_COLORS = ("red", "lime", "cyan", "yellow", "magenta")
_LINE_TOKENS = 12  # three numbers of three digits, what stands between them, the end of the line
_FORMS = {
    "point": "one point: x y",
    "detect": "one object a line: x y size",
    "segment": "its outline, one point a line: x y",
}


def grammar_of(skill: str, most: int) -> str:
    """The grammar of a skill's answers, with at most `most` lines."""
    if skill == "point":
        return spatial.point()
    return spatial.detect(most=most) if skill == "detect" else spatial.outline(most=most)


def places_of(text: str, size: tuple[int, int]) -> list[Place]:
    """The places of an answer in pixels; it has them in thousandths of the picture's width and height."""
    scale = (size[0] / 1000, size[1] / 1000, max(size) / 1000)
    rows = [[int(word) for word in line.split()] for line in text.splitlines()]
    return [tuple(value * unit for value, unit in zip(row, scale, strict=False)) for row in rows]


def draw(picture: Image.Image, skill: str, places: Sequence[Place], color: str) -> None:
    """Draw an answer into the picture."""
    pen = ImageDraw.Draw(picture)
    if skill == "segment":
        pen.polygon([(place[0], place[1]) for place in places], outline=color)
        return
    for x, y, *size in places:
        half = size[0] / 2 if size else 3
        pen.ellipse((x - half, y - half, x + half, y + half), outline=color)


def main(argv: Sequence[str] | None = None) -> int:
    """Ask, print and draw; returns 1 if an answer was cut off by `--max-tokens`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("endpoint", help="of a worker that runs with --images")
    add("model", help="folder or name of its model, for the processor")
    add("picture", type=Path)
    add("--ask", default="the largest object", help="what to look for")
    add("--skill", choices=_FORMS, default="detect")
    add("--most", type=int, default=20, help="lines of an answer")
    add("--answers", type=int, default=1)
    add("--temperature", type=float, default=0.7)
    add("--seed", type=int, help="makes the answers reproducible")
    add("--max-tokens", type=int, help="of an answer; default: enough for --most lines of numbers")
    add("--out", type=Path, help="file for the picture with the answers")
    args = parser.parse_args(argv)
    picture = Image.open(args.picture).convert("RGB")
    question = f"Find {args.ask}. Answer in thousandths of the width and height, {_FORMS[args.skill]}"
    content = [{"type": "image", "image": picture}, {"type": "text", "text": question}]
    prompt = chat_prompt(AutoProcessor.from_pretrained(args.model), [{"role": "user", "content": content}])
    fields = {} if args.seed is None else {"seed": args.seed}
    with RolloutClient(args.endpoint) as client:
        result = client.generate(
            prompt,
            n=args.answers,
            max_tokens=args.max_tokens or _LINE_TOKENS * args.most + 1,
            temperature=args.temperature,
            constraint={"grammar": grammar_of(args.skill, args.most)},
            return_text=True,
            **fields,
        )
    cut = False
    for i, completion in enumerate(result.completions):
        if completion.finish_reason != "stop":
            cut = True
            print(json.dumps({"answer": i, "finish_reason": completion.finish_reason}))
            continue
        places = places_of(completion.text, picture.size)
        rounded = [[round(value, 1) for value in place] for place in places]
        print(json.dumps({"answer": i, "places": rounded, "logprob": round(float(completion.logprobs.sum()), 3)}))
        draw(picture, args.skill, places, _COLORS[i % len(_COLORS)])
    if args.out is not None:
        picture.save(args.out)
    return int(cut)


if __name__ == "__main__":
    raise SystemExit(main())
