"""Settings: the order of the sources, and what each of them refuses."""

import re
import tomllib
from pathlib import Path

import pytest

from rollout.config import EngineConstants, EngineSettings, ModelConstants, ServiceConstants, Settings
from rollout.config.gateway_settings import GatewayFile
from rollout.config.retired import RETIRED
from rollout.config.section import SettingsSection
from rollout.engine.step.rehearsal import COMPILE_THREADS
from rollout.service.requests.intake import STOP_CHECK_EVERY
from rollout.settings_sources import (
    POSITIONAL,
    SettingsError,
    flags_hint,
    load_program,
    load_settings,
    retired_flags,
    setting_keys,
)

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
        if key.section is not None and key.path not in POSITIONAL:
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


@pytest.mark.parametrize("name", ["kernel_cache", "disk_kv_folder"])
def test_a_folder_has_a_name(tmp_path, name):
    assert f"engine.{name}" in message(write(tmp_path, f'[engine]\n{name} = ""'))


def test_numbers_are_finite(tmp_path):
    assert "finite" in message(write(tmp_path, "[service]\nlease_s = inf"))
    assert "lease_s" in message(service__lease_s="nan")
    assert "finite" in message(service__lease_s="inf")


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
    declared = {
        f"{section}.{name}" if hasattr(field.annotation, "model_fields") else section
        for section, field in Settings.model_fields.items()
        for name in getattr(field.annotation, "model_fields", {"": None})
    }
    assert {key.path for key in keys} == declared - {
        f"{section}.constants" for section in ("engine", "model", "service")
    }


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


# --- names that were settings once ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RETIRED)
def test_a_setting_that_is_none_any_more_says_what_holds_now_in_every_source(tmp_path, name):
    section, _, key = name.partition(".")
    says = f"{name} is not a setting any more: {RETIRED[name]}; remove it"
    assert message(write(tmp_path, f"[{section}]\n{key} = 1")) == f"{tmp_path / 'worker.toml'}: {says}"
    variable = f"ROLLOUT_{section}__{key}".upper()
    assert message(environ={variable: "1"}) == f"environment variable {variable}: {says}"
    assert message(**{f"{section}__{key}": "1"}) == f"flags: {says}"
    assert retired_flags()[f"--{key.replace('_', '-')}"] == says


def test_no_setting_has_the_name_or_the_flag_of_one_that_is_none_any_more():
    assert not RETIRED.keys() & {key.path for key in setting_keys()}
    assert not retired_flags().keys() & {key.flag for key in setting_keys()}
    assert len(retired_flags()) == len(RETIRED)


def test_what_holds_now_is_what_the_code_has():
    groups = {"engine": EngineConstants(), "model": ModelConstants(), "service": ServiceConstants()}
    constants = {f"{section}.{name}": value for section, group in groups.items() for name, value in group}
    constants |= {"engine.compile_threads": COMPILE_THREADS, "engine.stop_check_every": STOP_CHECK_EVERY}
    words = {
        "engine.mask_threads",
        "engine.sleep_rows",
        "engine.sleep_requests",
        "engine.fair_queue",
        "engine.fused_experts",
        "engine.cuda_graphs",
        "engine.expert_dtype",
        "model.cpu_threads",
        "metrics.timeline",
    }  # without a number
    words |= {"metrics.wandb_dir", "metrics.wandb_group", "metrics.wandb_name"}
    elsewhere = {"metrics.timeline_steps", "service.heartbeat_s", "engine.stall_s", "engine.rank_start_stall_s"}
    never_settings = {"service.max_reports", "service.max_report_bytes"}
    never_settings |= {"engine.shared_saved_bytes", "engine.ahead_saved_bytes", "engine.shared_positions"}
    never_settings |= {"engine.unpaid_share", "service.send_hwm", "service.max_histories", "service.max_history_bytes"}
    constants = {name: value for name, value in constants.items() if name not in never_settings}
    assert constants.keys() | words | elsewhere == RETIRED.keys()
    for name, value in constants.items():
        if name not in words:
            assert f"{value:g}" in RETIRED[name] or str(value) in RETIRED[name], name


@pytest.mark.parametrize("given", [{"engine.constants": "1"}, {"service.constants": {"max_n": 3}}])
def test_no_source_sets_a_constant(tmp_path, given):
    with pytest.raises(SettingsError, match="unknown setting"):
        load_settings(None, {}, given)
    assert "unknown setting engine.constants" in message(write(tmp_path, "[engine.constants]\nsession_share = 0.1"))
    assert "unknown setting" in message(environ={"ROLLOUT_ENGINE__CONSTANTS": "{}"})


# --- groups -----------------------------------------------------------------------------------------------------------


def test_every_setting_of_a_large_section_stands_in_one_small_group():
    for section in ("engine", "service"):
        keys = [key for key in setting_keys() if key.section == section]
        groups = [key.group for key in keys]
        assert len({key.name for key in keys}) == len(keys)
        assert max(map(groups.count, groups)) <= 10
    assert all(issubclass(base, SettingsSection) for base in EngineSettings.__bases__)


# --- a gateway --------------------------------------------------------------------------------------------------------


def gateway_message(config: Path | None = None, environ: dict[str, str] | None = None, **flags: object) -> str:
    with pytest.raises(SettingsError) as caught:
        load_program(GatewayFile, config, environ or {}, {f"gateway.{name}": value for name, value in flags.items()})
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_a_gateway_has_the_sources_of_a_worker_in_the_same_order(tmp_path):
    config = write(
        tmp_path, "[gateway]\nendpoints = ['tcp://a:1', 'tcp://b:1']\nport = 1\nsend_s = 3.0\nlogprobs = 'raw'"
    )
    environ = {"ROLLOUT_GATEWAY__PORT": "2", "ROLLOUT_GATEWAY__SERVED_MODEL_NAME": "one, two"}
    given = load_program(GatewayFile, config, environ, {"gateway.port": "3", "gateway.resume": False}).gateway
    assert given.endpoints == ("tcp://a:1", "tcp://b:1") and given.served_model_name == ("one", "two")
    assert (given.port, given.send_s, given.logprobs, given.resumes) == (3, 3.0, "raw", False)
    assert load_program(GatewayFile, config, {"ROLLOUT_GATEWAY__RESUME": "none"}, {}).gateway.resumes


def test_worker_and_gateway_share_a_file_and_an_environment(tmp_path):
    config = write(tmp_path, "log_level = 'error'\n[engine]\nmax_rows = 7\n[gateway]\nendpoints = ['tcp://a:1']")
    environ = {"ROLLOUT_ENGINE__PAGE_SIZE": "8", "ROLLOUT_GATEWAY__PORT": "9"}
    worker, gateway = load_settings(config, environ, {}), load_program(GatewayFile, config, environ, {}).gateway
    assert (worker.engine.max_rows, worker.engine.page_size, worker.log_level) == (7, 8, "error")
    assert (gateway.endpoints, gateway.port) == (("tcp://a:1",), 9)


def test_a_gateways_errors_name_source_setting_and_what_is_allowed(tmp_path):
    assert "mean port?" in gateway_message(write(tmp_path, "[gateway]\nprot = 3"))
    assert "worker.toml: gateway.port = '3'" in gateway_message(write(tmp_path, "[gateway]\nport = '3'"))
    assert "flag --port: gateway.port = '70000'" in gateway_message(port="70000")
    assert "must be one of policy, processed, raw" in gateway_message(logprobs="all")
    assert "ROLLOUT_GATEWAY__SEND_S" in gateway_message(environ={"ROLLOUT_GATEWAY__SEND_S": "0"})
    assert "ROLLOUT_GATEWAY__PORT?" in gateway_message(environ={"ROLLOUT_GATEWAY__PROT": "1"})
    assert "ENDPOINT" in gateway_message() and "ENDPOINT" in gateway_message(endpoints=["tcp://a:1", "tcp://a:1"])
