"""Settings: the order of the sources, and what each of them refuses."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from rollout.config import Settings
from rollout.settings_sources import POSITIONAL, SettingsError, flags_hint, load_settings, setting_keys

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = sorted((ROOT / "configs").glob("*.toml"))


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "worker.toml"
    path.write_text(text)
    return path


def message(config: Path | None = None, environ: dict[str, str] | None = None, **flags: object) -> str:
    with pytest.raises(SettingsError) as caught:
        load_settings(config, environ or {}, {key.replace("__", "."): value for key, value in flags.items()})
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_without_sources_every_setting_has_its_default():
    assert load_settings(None, {"PATH": "/bin", "HOME": "/"}, {}) == Settings()


def test_environment_wins_over_file_and_flag_over_environment(tmp_path):
    config = write(tmp_path, "log_level = 'error'\n[engine]\nmax_rows = 1\npage_size = 8\nkv_pages = 100")
    environ = {"ROLLOUT_ENGINE__MAX_ROWS": "2", "ROLLOUT_ENGINE__PAGE_SIZE": "4", "ROLLOUT_LOG_LEVEL": "debug"}
    settings = load_settings(config, environ, {"engine.max_rows": "3"})
    assert settings.engine.max_rows == 3
    assert settings.engine.page_size == 4
    assert settings.engine.kv_pages == 100
    assert settings.log_level == "debug"


def test_a_text_that_names_a_setting_gets_its_flag():
    for key in setting_keys():
        if key.section is not None and key.path != POSITIONAL:
            for text in (f"raise {key.path}.", f"'{key.path}' = 3 is too much", f"{key.path}: lower it"):
                assert flags_hint(text).endswith(f" {key.flag})")
            assert flags_hint(f"lower {key.path}, or {key.flag}") == ""


def test_a_setting_without_its_section_is_known_by_its_form_or_by_being_given():
    assert flags_hint("lower max_rows or kv_pages") == " (flags: --max-rows, --kv-pages)"
    assert "--longrope" in flags_hint("use longrope = short")
    assert flags_hint("a device with more memory, images, and a path to sleep") == ""
    assert "--device" in flags_hint("device 'x' is none", {"model.device": "x"})
    assert flags_hint("/no/key is missing", {"security.curve_secret_key": "/no/key"}) == " (flag: --curve-secret-key)"
    assert flags_hint("auto is not possible", {"model.dtype": "auto"}) == ""
    assert flags_hint("model.layers.0 of /folder/max_rows and docs/max_rows.md, --max-rows") == ""
    assert flags_hint("bind = x") == "", "two sections have it"


def test_a_source_leaves_the_other_settings_of_a_section_alone(tmp_path):
    config = write(tmp_path, "[service]\nmax_queue = 7")
    settings = load_settings(config, {}, {"service.bind": "tcp://127.0.0.1:1"})
    assert (settings.service.max_queue, settings.service.bind) == (7, "tcp://127.0.0.1:1")


@pytest.mark.parametrize(
    ("path", "text", "value"),
    [
        ("engine.pipeline_depth", "1", 1),
        ("engine.prefix_cache", "false", False),
        ("engine.kv_memory_fraction", "0.5", 0.5),
        ("engine.kv_pages", "none", None),
        ("engine.kv_pages", "64", 64),
        ("metrics.jsonl", "none", None),
        ("model.path", "none", "none"),  # a checkpoint may have that name: the setting is not optional
        ("service.max_queue", "0012", 12),
        ("exit_with_parent", "true", True),
    ],
)
def test_text_becomes_the_type_of_the_setting(path, text, value):
    key = next(key for key in setting_keys() if key.path == path)
    for settings in (load_settings(None, {key.env: text}, {}), load_settings(None, {}, {path: text})):
        section = getattr(settings, key.section) if key.section else settings
        found = getattr(section, key.name)
        assert found == value and type(found) is type(value)


def test_unknown_keys_name_their_source_the_nearest_and_the_allowed(tmp_path):
    text = message(write(tmp_path, "[engine]\nmax_row = 3"))
    assert "worker.toml" in text and "engine.max_row;" in text and "mean max_rows?" in text and "kv_pages" in text
    text = message(write(tmp_path, "[engin]\nmax_rows = 3"))
    assert "engin;" in text and "mean engine?" in text
    text = message(environ={"ROLLOUT_ENGINE_MAX_ROWS": "3"})
    assert "ROLLOUT_ENGINE_MAX_ROWS" in text and "mean ROLLOUT_ENGINE__MAX_ROWS?" in text
    text = message(engine__max_rwos="3")
    assert "flags" in text and "mean engine.max_rows?" in text


@pytest.mark.parametrize("value", ["'64'", "64.0", "true", "0", "4097", "[]"])
def test_a_file_keeps_toml_types_and_ranges(tmp_path, value):
    text = message(write(tmp_path, f"[engine]\nmax_rows = {value}"))
    assert "worker.toml: engine.max_rows" in text and "sequences that decode at once" in text


@pytest.mark.parametrize("value", ["true", "1.0", "'1'", "3"])
def test_a_choice_is_not_met_by_something_that_only_equals_it(tmp_path, value):
    assert "must be one of 1, 2" in message(write(tmp_path, f"[engine]\npipeline_depth = {value}"))


@pytest.mark.parametrize("text", ["", "many", "1e3", "0", "-1", "3.5"])
def test_bad_text_names_the_variable_or_the_flag(text):
    assert "ROLLOUT_ENGINE__MAX_ROWS: engine.max_rows" in message(environ={"ROLLOUT_ENGINE__MAX_ROWS": text})
    assert "flag --max-rows: engine.max_rows" in message(engine__max_rows=text)


def test_numbers_are_finite(tmp_path):
    assert "finite" in message(write(tmp_path, "[service]\nheartbeat_s = inf"))
    assert "heartbeat_s" in message(service__heartbeat_s="nan")
    assert "finite" in message(service__heartbeat_s="inf")


def test_a_bad_value_is_an_error_even_if_a_later_source_replaces_it(tmp_path):
    assert "worker.toml" in message(write(tmp_path, "[engine]\nmax_rows = 0"), engine__max_rows="3")


def test_settings_that_do_not_go_together_say_so_and_nothing_of_how_that_is_checked():
    said = message(engine__deterministic=True, engine__adapter_slots=2)
    assert said.startswith("settings: engine: deterministic") and said.endswith("set adapter_slots = 0")


def test_files_that_cannot_be_read_are_settings_errors(tmp_path):
    assert "nothing.toml" in message(tmp_path / "nothing.toml")
    assert "not a TOML file" in message(write(tmp_path, "[engine\n"))
    assert "is a section" in message(write(tmp_path, "engine = 3"))
    assert "log_level" in message(write(tmp_path, "[log_level]\nx = 1"))


def test_every_setting_has_a_description_and_one_spelling_in_each_source():
    keys = setting_keys()
    assert all(key.field.description for key in keys)
    for spelling in ("path", "env", "flag"):
        assert len({getattr(key, spelling) for key in keys}) == len(keys)
    count = sum(len(getattr(field.annotation, "model_fields", "x")) for field in Settings.model_fields.values())
    assert len(keys) == count


def test_a_flag_is_the_bare_name_and_has_its_section_only_on_a_clash():
    flags = {key.path: key.flag for key in setting_keys()}
    assert flags["service.bind"] == "--bind"
    assert flags["weights.bind"] == "--weights-bind"
    assert flags["engine.max_rows"] == "--max-rows"
    assert flags["model.path"] == "MODEL"


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_shipped_configs_load_and_say_of_every_setting_what_it_is(config):
    settings = load_settings(config, {}, {})
    document = tomllib.loads(config.read_text())
    for section, values in document.items():
        for name, value in values.items():
            assert getattr(getattr(settings, section), name) == value
    for line in config.read_text().splitlines():
        assert re.match(r"^$|^#|^\[\w+\]$|^\w+ = .*\s# \w", line), line


def test_the_three_configs_are_shipped():
    assert [path.stem for path in CONFIGS] == ["cpu_tiny", "qwen3_30b_a3b_h200", "qwen3_8b_h200"]
