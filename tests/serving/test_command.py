"""`ds41jax serve` and `ds41jax clients` as a person starts them."""

import argparse
import json
import os
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import httpx
import openai
import pytest

from ds41jax import cli
from ds41jax.cache.planner import state_bytes
from ds41jax.cache.pool import PageLayout
from ds41jax.checkpoint.presets import tiny_config
from ds41jax.checkpoint.synthetic import make_checkpoint
from ds41jax.config import load_config
from ds41jax.model.state import PAGE_ROWS
from ds41jax.serving import clients_command, command
from ds41jax.serving.arguments import engine_options, generation_config, read_key

CONFIGS = Path(__file__).parents[2] / "configs"
MAIN = [sys.executable, "-c", "from ds41jax.cli import main; raise SystemExit(main())"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("serve") / "tiny"
    make_checkpoint(path, tiny_config(), seed=0, progress=False)
    return path


def test_serve(folder: Path) -> None:
    """Starts on a tiny checkpoint, answers, and ends by itself after a signal."""
    options = ["--listen", "127.0.0.1:0", "--no-warm-up", "--concurrency", "2"]
    options += ["--max-context-tokens", "1024", "--kv-pool-tokens", "4096", "--no-dspark"]
    process = subprocess.Popen(
        [*MAIN, "serve", "--model", str(folder), *options],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "DS41JAX_API_KEY": "secret"},
    )
    try:
        assert process.stdout is not None
        lines = iter(process.stdout.readline, "")
        ready = next(line for line in lines if line.startswith("Ready: "))
        url = ready.split()[1]
        assert httpx.get(f"{url}/health").status_code == 200
        assert httpx.get(f"{url}/v1/models").status_code == 401
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="secret", timeout=120)
        fields = {"model": "DeepSeek-V4.1-Flash", "max_tokens": 4, "temperature": 0}
        messages = [{"role": "user", "content": "hi"}]
        answer = client.chat.completions.create(**fields, messages=messages)
        assert answer.usage.completion_tokens == 4
        chunks = client.chat.completions.create(**fields, messages=messages, stream=True)
        assert "".join(
            getattr(chunk.choices[0].delta, "reasoning_content", None) or "" for chunk in chunks
        ) == (answer.choices[0].message.reasoning_content or "")
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()


def test_dry_run(folder: Path) -> None:
    command = [*MAIN, "serve", "--dry-run", "--model", str(folder), "--listen"]
    done = subprocess.run([*command, "127.0.0.1:0"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "page pool" in done.stdout
    done = subprocess.run([*command, "nowhere"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "--listen" in done.stderr


def test_clients(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    clients_command.add_arguments(parser)
    assert clients_command.run(parser.parse_args(["--url", "http://x:1/", "--key", "k"])) == 0
    text = capsys.readouterr().out
    pi = text[text.index("{\n") : text.index("\n}\n") + 2]
    assert json.loads(pi)["providers"]["ds41jax"]["baseUrl"] == "http://x:1/v1"
    assert 'anthropic.Anthropic(base_url="http://x:1", api_key="k")' in text


def _parse(*arguments: str) -> argparse.Namespace:
    return cli._parser().parse_args(["serve", *arguments])


@pytest.mark.parametrize("file", sorted(CONFIGS.glob("serve-*.toml")), ids=lambda file: file.stem)
def test_sample_configurations(
    file: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They parse, differ from the defaults in every line, and pass every check."""
    model = ["--model", str(folder), "--listen", "127.0.0.1:0", "--dry-run"]
    args, plain = _parse("--config", str(file), *model), _parse(*model)
    stated = [key.replace("-", "_") for key in tomllib.loads(file.read_text())]
    same = [key for key in stated if getattr(args, key) == getattr(plain, key)]
    assert set(same) <= {"listen", "prefix_reuse"}  # said for the reader's sake
    assert command.run(args) == 0
    assert "Every check passed" in capsys.readouterr().out


@pytest.mark.parametrize(
    "flag",
    ["--dspark-adaptive", "--dspark-confidence-cutoff=1", "--dspark-reuse-floor=1", "--conc=4"],
)
def test_removed_and_shortened_options_are_refused(flag: str) -> None:
    with pytest.raises(SystemExit):
        _parse(flag)


def test_config_file(tmp_path: Path) -> None:
    file = tmp_path / "server.toml"
    file.write_text('concurrency = 4\ndspark = false\nalias = ["a", "b"]\nconsole-text = true\n')
    args = _parse("--config", str(file), "--concurrency", "2")
    assert (args.concurrency, args.dspark, args.console_text) == (2, False, True)
    assert args.alias == ["a", "b"]
    for text in ("unknown = 1", "concurrency = 17", "conc = 4", "broken", "[table]\na = 1"):
        file.write_text(text)
        with pytest.raises(SystemExit):
            _parse("--config", str(file))


def test_sizes_in_bytes(folder: Path) -> None:
    """Caches may be sized in bytes; a pool's own bytes are no more than what was said."""
    config = load_config(folder)
    args = _parse("--kv-pool-size", "8MiB", "--host-cache-bytes", "4MiB", "--dspark-fixed")
    options = engine_options(args, config)
    pages = PageLayout(config.source_ratios, PAGE_ROWS).total_pages(options.pool_tokens)
    assert 7 << 20 < pages * state_bytes(config)[1] <= 8 << 20
    assert options.host_tokens == pytest.approx(options.pool_tokens / 2, rel=0.01)
    assert options.host_snapshots == 2 * args.prefix_cache_entries
    for wrong in (["--kv-pool-size", "10"], ["--kv-pool-size=8MiB", "--kv-pool-tokens=9999"]):
        with pytest.raises(ValueError, match="kv-pool"):
            engine_options(_parse(*wrong), config)


def test_host_cache_options(folder: Path) -> None:
    """They reach the tier, in its own units."""
    more = "--host-cache-entries=3 --host-cache-min-tokens=700 --host-cache-max-tokens=9000 "
    more += "--host-cache-store=on-evict --host-cache-copy-budget-ms=20 "
    more += "--host-cache-restore-budget-ms=30 --host-cache-store-pace-ms=40"
    config = load_config(folder)
    tier = engine_options(_parse(*more.split()), config).host_options(config, pages=8)
    assert (tier.slots, tier.pages) == (3, 8) and not tier.write_behind
    assert (tier.min_tokens, tier.max_tokens) == (700, 9000)
    assert (tier.evict_wait, tier.restore_timeout, tier.pacing) == (0.02, 0.03, 0.04)


def test_key_and_sampling_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "key"
    file.write_text("secret\n")
    assert read_key(file) == "secret"
    file.write_text("\n")
    with pytest.raises(ValueError, match="empty"):
        read_key(file)
    monkeypatch.setenv("DS41JAX_API_KEY", "")
    with pytest.raises(ValueError, match="empty"):
        read_key(None)
    assert generation_config(tmp_path).temperature == 1.0
    sampling = tmp_path / "generation_config.json"
    sampling.write_text('{"temperature": 0.6, "top_p": 0.95, "do_sample": true}')
    assert generation_config(tmp_path).top_p == 0.95
    sampling.write_text('{"temperature": 7}')
    with pytest.raises(ValueError, match="out of range"):
        generation_config(tmp_path)
