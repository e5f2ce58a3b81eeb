"""The `ds41jax` command, as a user types it."""

import json

import pytest
from paths import GOLDEN, ROOT

from ds41jax.cli import main
from ds41jax.engine import default_model
from ds41jax.engine.loading import load_model


def test_generate_streams_text_and_a_summary(text_model, capsys):
    arguments = ["generate", "--model", str(text_model.path), "--max-tokens", "12", "Hello"]
    assert main(arguments) == 0
    drafted = capsys.readouterr()
    assert main([*arguments, "--no-dspark"]) == 0
    plain = capsys.readouterr()
    assert drafted.out == plain.out != "\n"
    assert "12 tokens" in drafted.err and "drafts accepted" in drafted.err
    assert "drafts accepted" not in plain.err


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--model", "/nowhere"], "/nowhere"),
        (["--model", str(GOLDEN / "tiny")], "no tokenizer"),
        (["--temperature", "-1"], "temperature"),
        (["--max-tokens", "0"], "max_tokens"),
    ],
)
def test_generate_faults_are_one_line(arguments, message, capsys):
    assert main(["generate", "Hello", *arguments]) == 1
    error = capsys.readouterr().err
    assert "Traceback" not in error
    assert error.splitlines()[-1].startswith("ds41jax generate: ") and message in error


def test_make_checkpoint_then_score(tmp_path, capsys):
    model = tmp_path / "tiny"
    assert main(["make-checkpoint", str(model), "--preset", "tiny"]) == 0
    assert main(["make-checkpoint", str(model), "--preset", "tiny"]) == 1
    assert str(model) in capsys.readouterr().err
    run = {"runs": {"a": {"input_ids": [1, 2, 3], "prompt_length": 3}}}
    (tmp_path / "in.json").write_text(json.dumps(run))
    assert (
        main(
            [
                "score",
                "--model",
                str(model),
                "--input",
                str(tmp_path / "in.json"),
                "--output",
                str(tmp_path / "out.safetensors"),
            ]
        )
        == 0
    )


def test_the_default_model_is_the_one_in_the_package(capsys):
    folder = default_model.default_model_path()
    assert "nano model" in capsys.readouterr().err
    sizes = [file.stat().st_size for file in folder.iterdir()]
    assert sum(sizes) <= 16_000_000 and max(sizes) < 5_000_000
    model = load_model(folder, progress=False)
    assert model.tokenizer is not None and model.tokenizer.vocab_size == model.config.vocab_size


def test_plan_prints_a_table_or_what_is_missing(capsys):
    config = str(ROOT / "configs" / "deepseek-v4.1-flash.json")
    assert main(["plan", config, "--device", "96GiB"]) == 0
    table = capsys.readouterr().out
    assert "page pool" in table and "routed experts" in table
    assert main(["plan", config, "--device", "8GiB"]) == 1
    assert "ds41jax plan: " in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["plan", config, "--device", "many"])
