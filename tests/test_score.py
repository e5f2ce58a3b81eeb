"""`score`: the oracle's numbers out of a JSON file, and one clear message for a bad one."""

import json

import numpy as np
import pytest
from oracle import recorded
from paths import GOLDEN
from safetensors.numpy import load_file, save_file

from ds41jax.cli import main
from ds41jax.engine.score import ScoreError, read_runs

STEPS = 4


@pytest.fixture(scope="module")
def runs():
    return recorded("tiny_runs")


def run_of(runs, name, steps=STEPS):
    ids = [*runs[f"{name}.input_ids"].tolist(), *runs[f"{name}.decode_tokens"].tolist()[:steps]]
    return {"input_ids": ids, "prompt_length": len(runs[f"{name}.input_ids"])}


def image_run(runs, folder):
    save_file({"patches": runs["img.patches"]}, folder / "image.safetensors")
    return run_of(runs, "img") | {
        "token_types": runs["img.token_types"].tolist(),
        "images": "image.safetensors",
        "image_key": "patches",
        "n_vit_h": 6,
        "n_vit_w": 8,
    }


def score(folder, data, *options):
    (folder / "in.json").write_text(json.dumps(data))
    target = folder / "out.safetensors"
    code = main(
        [
            "score",
            "--model",
            str(GOLDEN / "tiny"),
            "--input",
            str(folder / "in.json"),
            "--output",
            str(target),
            *options,
        ]
    )
    return code, target


def test_float32_scores_equal_the_smooth_oracle(tmp_path, runs):
    data = {"runs": {"text": run_of(runs, "p20"), "picture": image_run(runs, tmp_path)}}
    code, target = score(tmp_path, data, "--numerics", "float32")
    assert code == 0
    out = load_file(target)
    for name, source in (("text", "p20"), ("picture", "img")):
        count = len(runs[f"{source}.input_ids"])
        logits = out[f"{name}.logits"]
        assert logits.dtype == np.float32 and len(logits) == count + STEPS
        np.testing.assert_allclose(
            logits[:count], runs[f"{source}.smooth.prefill_logits"], atol=1e-3
        )
        np.testing.assert_allclose(
            logits[count:], runs[f"{source}.smooth.decode_logits"][:STEPS], atol=1e-3
        )
        hidden = out[f"{name}.main_hidden"]
        np.testing.assert_allclose(
            hidden[:count], runs[f"{source}.smooth.prefill_main_hidden"], atol=1e-3
        )
        # The last step has no following token to anchor its draft.
        last = STEPS - 1
        ids = out[f"{name}.draft_ids"][:last]
        np.testing.assert_array_equal(ids, runs[f"{source}.smooth.spec_ids"][:last, 1:])
        np.testing.assert_allclose(
            out[f"{name}.draft_logits"][:last],
            runs[f"{source}.smooth.spec_logits"][:last],
            atol=1e-3,
        )
        np.testing.assert_allclose(
            out[f"{name}.draft_confidence"][:last],
            runs[f"{source}.smooth.spec_confidence"][:last],
            atol=1e-3,
        )


def test_bounded_scores_leave_the_dropped_rows_empty(tmp_path, runs):
    bounded = recorded("tiny_bounded")
    code, target = score(
        tmp_path,
        {"runs": {"a": run_of(runs, "p20", 0)}},
        "--numerics",
        "float32",
        "--prefill",
        "bounded",
    )
    assert code == 0
    logits = load_file(target)["a.logits"]
    wanted = bounded["p20.smooth.prefill_logits"]
    assert np.isnan(logits[: 20 - len(wanted)]).all()
    np.testing.assert_allclose(logits[20 - len(wanted) :], wanted, atol=1e-3)
    assert "a.draft_ids" not in load_file(target)


GOOD = {"input_ids": [3, 4, 5], "prompt_length": 2}
IMAGE = {
    "token_types": [-1, 0],
    "images": "x.safetensors",
    "image_key": "k",
    "n_vit_h": 1,
    "n_vit_w": 1,
}


@pytest.mark.parametrize(
    "data, message",
    [
        ([], "runs"),
        ({"runs": {}}, "at least one run"),
        ({"runs": {"a": 3}}, "runs.a"),
        ({"runs": {"a": GOOD | {"prompt_length": 4}}}, "runs.a.prompt_length"),
        ({"runs": {"a": GOOD | {"prompt_length": True}}}, "runs.a.prompt_length"),
        ({"runs": {"a": GOOD | {"input_ids": []}}}, "runs.a.input_ids"),
        ({"runs": {"a": GOOD | {"input_ids": [1, 512]}}}, "runs.a.input_ids"),
        ({"runs": {"a": GOOD | {"input_ids": [1, 2.5]}}}, "runs.a.input_ids"),
        ({"runs": {"a": GOOD | {"inputs": []}}}, "unknown field inputs"),
        ({"runs": {"a": GOOD | {"images": "x"}}}, "needs token_types"),
        ({"runs": {"a": GOOD | IMAGE}}, "must mark 4 positions"),
        ({"runs": {"a": GOOD | IMAGE | {"n_vit_h": 0}}}, "positive integers"),
        (
            {
                "runs": {
                    "a": {"input_ids": [1] * 4, "prompt_length": 4}
                    | IMAGE
                    | {"token_types": [0, 1, 2, 3]}
                }
            },
            "cannot read k",
        ),
    ],
)
def test_malformed_runs_are_named(tmp_path, model, data, message):
    (tmp_path / "in.json").write_text(json.dumps(data))
    with pytest.raises(ScoreError, match=message):
        list(read_runs(tmp_path / "in.json", model))


def test_bad_files_are_one_message_without_traceback(tmp_path, capsys):
    (tmp_path / "in.json").write_text("{")
    arguments = ["score", "--model", str(GOLDEN / "tiny"), "--output", str(tmp_path / "o")]
    for name in ("in.json", "missing.json"):
        assert main([*arguments, "--input", str(tmp_path / name)]) == 1
        message = capsys.readouterr().err.splitlines()[-1]
        assert message.startswith("ds41jax score: ") and name in message
    assert not (tmp_path / "o").exists()
