"""The text codec on a real tokenizer in a folder."""

import pytest

from rollout.text.codec import TextCodec, load_text_codec
from tests.support.tokenizer_folder import make_tokenizer_folder
from trainer_bridge.wire.errors import RolloutError


def test_text_survives_encoding_and_special_tokens_are_not_shown(codec):
    assert codec.decode(codec.encode("naïve 👍 café").tolist()) == "naïve 👍 café"
    assert codec.decode([300, *codec.encode("x").tolist(), 301]) == "x"


def test_folder_without_tokenizer_gives_none(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert load_text_codec(tmp_path) is None


def test_folder_with_tokenizer_gives_a_codec(tmp_path):
    assert isinstance(load_text_codec(make_tokenizer_folder(tmp_path)), TextCodec)


def test_broken_tokenizer_is_an_error_that_names_the_folder(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{not json")
    with pytest.raises(ValueError, match=str(tmp_path)):
        load_text_codec(tmp_path)


def test_code_in_a_model_folder_is_never_run(tmp_path):
    make_tokenizer_folder(tmp_path)
    marker = tmp_path / "ran"
    (tmp_path / "evil.py").write_text(f"open({str(marker)!r}, 'w')\nclass Evil: pass\n")
    (tmp_path / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}}'
    )
    try:
        load_text_codec(tmp_path)
    except ValueError as error:
        assert str(tmp_path) in str(error)
    assert not marker.exists()


def test_continued_message_gets_no_generation_prompt(codec):
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "the fox"}]
    assert codec.render_chat(messages, options={"continue_final_message": True}).endswith("the fox")


def test_model_without_chat_template_refuses_messages(tmp_path):
    codec = TextCodec(make_tokenizer_folder(tmp_path, template=None))
    with pytest.raises(RolloutError, match="no chat template"):
        codec.render_chat([{"role": "user", "content": "x"}])


def test_template_cannot_reach_python(tmp_path):
    template = "{{ messages.__class__.__mro__[1].__subclasses__() }}"
    codec = TextCodec(make_tokenizer_folder(tmp_path, template=template))
    with pytest.raises(RolloutError, match="SecurityError"):
        codec.render_chat([{"role": "user", "content": "x"}])
