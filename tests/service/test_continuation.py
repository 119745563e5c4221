"""`continue_from` as a resuming client sends it: nothing generated yet, drawn log-probs, text that goes on."""

import numpy as np
import pytest

from rollout.engine.messages.to_service import Finish
from rollout.service.text.stop_strings import StopText
from tests.support.service.harness import delta, done, serving


def test_a_completion_without_tokens_begins_from_its_own_seed(bench):
    client = bench.client()
    client.send("generate", prompt=[1], max_tokens=2, continue_from={"token_ids": [], "seed": 77, "versions": []})
    request = bench.submitted()
    assert request.prior is not None and len(request.prior.token_ids) == 0 and request.sampling.seed == 77
    bench.put(delta(request.key, 0, 0, [11, 12], finish=Finish("length")), done(request))
    assert client.receive()["completions"][0]["token_ids"].tolist() == [11, 12]


def test_drawn_logprobs_of_old_tokens_come_back(bench):
    client = bench.client()
    prior = {"token_ids": [11, 12], "seed": 77, "drawn_logprobs": np.array([-5, -6], np.float32)}
    client.send("generate", prompt=[1], max_tokens=5, continue_from=prior, stream="tokens", stream_every=1)
    request = bench.submitted()
    new = delta(request.key, 0, 2, [13], drawn_logprobs=np.array([-9], np.float32), finish=Finish("length"))
    bench.put(new, done(request))
    chunk, result = client.receive(), client.receive()
    assert chunk["drawn_logprobs"].tolist() == [-9]
    assert result["completions"][0]["drawn_logprobs"].tolist() == [-5, -6, -9]


@pytest.mark.parametrize("field", [{"drawn_logprobs": [1.0]}, {"text_chars": -1}, {"text_chars": "3"}])
def test_wrong_fields_of_continue_from_are_refused(bench, field):
    prior = {"token_ids": [11, 12], "seed": 77, **field}
    reply = bench.client().ask("generate", prompt=[1], max_tokens=5, continue_from=prior)
    assert reply["code"] == "bad_request" and reply["field"].startswith("continue_from")


def test_text_goes_on_after_the_characters_that_the_client_has(codec):
    tokens = codec.encode("the quick ENde ENDless").tolist()
    with serving(codec) as bench:
        client = bench.client()
        prior = {"token_ids": tokens[:3], "seed": 1, "text_chars": 2}
        fields = {"continue_from": prior, "return_text": True, "stream": "tokens", "stream_every": 1}
        client.send("generate", prompt=[1], max_tokens=50, **fields)
        request = bench.submitted()
        bench.put(delta(request.key, 0, 3, tokens[3:], finish=Finish("length")), done(request))
        text = codec.decode(tokens)
        assert client.receive()["text"] == text[2:]
        assert client.receive()["completions"][0]["text"] == text


def test_pieces_of_text_fit_together_wherever_a_completion_changes_workers(codec):
    tokens = codec.encode("the ENe END é 👍 漢ENdEN done").tolist()
    whole = codec.decode(tokens)
    for cut in range(len(tokens) + 1):
        first = StopText(codec.decode, ["ENDLESS", "EN done!"])
        first.feed(tokens[:cut])
        before = first.take()
        second = StopText(codec.decode, ["ENDLESS", "EN done!"], 0, tokens[:cut], len(before))
        second.feed(tokens[cut:])
        second.finish()
        assert before + second.take() == whole and second.text == whole


@pytest.mark.parametrize("reason", ["cancelled", "error", "deadline", "stale"])
def test_an_interrupted_completion_shows_no_text_that_later_tokens_change(codec, reason):
    """Half a character, and what may become a stop string, come with the tokens that make them whole."""
    tokens = codec.encode("the ENe é 👍 漢EN done").tolist()
    whole, stop = codec.decode(tokens), {"strings": ["ENDLESS", "EN done!"]}
    fields = {"prompt": [1], "max_tokens": 90, "return_text": True, "stream": "tokens", "stream_every": 1, "stop": stop}
    with serving(codec) as bench:
        client = bench.client()
        for cut in range(1, len(tokens)):
            client.send("generate", f"a{cut}", **fields)
            request = bench.submitted()
            bench.put(delta(request.key, 0, 0, tokens[:cut], finish=Finish(reason)), done(request))
            shown, first = client.receive()["text"], client.receive()["completions"][0]
            assert shown == first["text"] and whole.startswith(shown)
            assert len(shown) >= len(codec.decode(tokens[:cut])) - len("EN done"), "nothing else is held back"
            prior = {"token_ids": tokens[:cut], "seed": 1, "text_chars": len(shown)}
            client.send("generate", f"b{cut}", continue_from=prior, **fields)
            request = bench.submitted()
            bench.put(delta(request.key, 0, cut, tokens[cut:], finish=Finish("length")), done(request))
            assert shown + client.receive()["text"] == client.receive()["completions"][0]["text"] == whole


def test_a_finished_completion_shows_all_its_text(codec):
    """Nothing follows; half a character becomes U+FFFD."""
    tokens = codec.encode("an END 漢").tolist()
    with serving(codec) as bench:
        client = bench.client()
        stop = {"strings": ["ENDLESS", "END 漢!"]}
        for name, ids in {"half": tokens[:-1], "whole": tokens}.items():
            client.send("generate", name, prompt=[1], max_tokens=90, return_text=True, stop=stop)
            request = bench.submitted()
            bench.put(delta(request.key, 0, 0, ids, finish=Finish("length")), done(request))
            assert client.receive()["completions"][0]["text"] == codec.decode(ids)
        assert codec.decode(tokens[:-1]).startswith("an END \ufffd")


def test_an_adapters_tokens_go_on_with_an_adapter_or_without_its_versions():
    """Marks that went on over the model's own tokens would name a version that did not draw them."""
    prior = {"token_ids": [11, 12], "seed": 77, "adapter_versions": [[0, 3]]}
    fields = {"prompt": [1], "max_tokens": 5}
    with serving() as bench:
        client = bench.client()
        refused = client.ask("generate", "r", continue_from=prior, **fields)
        assert (refused["code"], refused["field"]) == ("bad_request", "adapter")
        assert "adapter_versions" in refused["message"]
        client.send("generate", "a", continue_from=prior, adapter="chess", **fields)
        request = bench.submitted()
        new = delta(request.key, 0, 2, [13], adapter_versions=((2, 4),), finish=Finish("length"))
        bench.put(new, done(request))
        assert client.receive()["completions"][0]["adapter_versions"] == [[0, 3], [2, 4]]
        client.send("generate", "c", continue_from=prior, adapter="chess", **fields)
        request, marks = bench.submitted(), ((2, 3), (3, 4))
        bench.put(delta(request.key, 0, 2, [13, 14], adapter_versions=marks, finish=Finish("length")), done(request))
        assert client.receive()["completions"][0]["adapter_versions"] == [[0, 3], [3, 4]], "at 2 nothing changed"
        client.send("generate", "b", continue_from={**prior, "adapter_versions": []}, **fields)
        request = bench.submitted()
        bench.put(delta(request.key, 0, 2, [13], finish=Finish("length")), done(request))
        assert "adapter_versions" not in client.receive()["completions"][0]
