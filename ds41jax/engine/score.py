"""Teacher-forced evaluation of given token sequences, for comparing quantisations and for tests.

The input is a JSON file, the output a safetensors file; see `score_file`.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401 (teaches numpy the dtypes of image files)
import numpy as np
import safetensors.numpy
from tqdm import tqdm

from ds41jax.engine.loading import Model
from ds41jax.engine.session import Prompt, Session, StepResult
from ds41jax.kernels.compute import Compute
from ds41jax.model.vision import IMAGE_CHANNELS, TokenType, image_span, num_image_tokens

MAX_INPUT_BYTES = 256 << 20
_IMAGE_FIELDS = ("token_types", "images", "image_key", "n_vit_h", "n_vit_w")


class ScoreError(ValueError):
    """A score input that cannot be evaluated; the message names the run and the field."""


@dataclass(frozen=True)
class ScoreRun:
    """One sequence: `input_ids[:prompt_length]` is prefilled, the rest fed token by token."""

    name: str
    input_ids: np.ndarray
    prompt_length: int
    token_types: np.ndarray | None = None
    patches: np.ndarray | None = None
    grid: tuple[int, int] = (0, 0)


def score_file(
    model: Model, source: Path, target: Path, compute: Compute, *, bounded: bool, progress: bool
) -> None:
    """Evaluates the runs of a JSON file and writes their results.

    Input: `{"runs": {NAME: {"input_ids": [...], "prompt_length": N}}}`, with `token_types`,
    `images` (a safetensors file, relative to the JSON), `image_key`, `n_vit_h` and `n_vit_w` where
    the prompt holds an image.

    Output, float32: `NAME.logits` [T, V] and `NAME.main_hidden` [T, targets * hidden], NaN for the
    prompt rows that a bounded prefill leaves out; and per single-token step `NAME.draft_ids` and
    `NAME.draft_confidence` [S, K], `NAME.draft_logits` [S, K, V]. A step's draft starts from the
    next given token, after the last step from the most likely one.

    Raises:
      ScoreError: before anything is evaluated, if the input is malformed.
    """
    runs = list(read_runs(source, model))
    results: dict[str, np.ndarray] = {}
    for run in tqdm(runs, desc="scoring", unit="run", disable=not progress):
        for key, value in score(model, run, compute, bounded=bounded).items():
            results[f"{run.name}.{key}"] = value
    safetensors.numpy.save_file(results, target)


def score(model: Model, run: ScoreRun, compute: Compute, *, bounded: bool) -> dict[str, np.ndarray]:
    """Results of one run by name, as `score_file` describes them."""
    session = Session(model, len(run.input_ids) + model.config.dspark_block_size, compute)
    prefilled = session.prefill(run_prompt(model, run, compute), bounded=bounded, all_rows=True)
    stepped: list[StepResult] = []
    drafts: dict[str, list[np.ndarray]] = {
        "draft_ids": [],
        "draft_logits": [],
        "draft_confidence": [],
    }
    for position in range(run.prompt_length, len(run.input_ids)):
        stepped.append(session.step(run.input_ids[position : position + 1]))
        if model.params.drafter is None:
            continue
        following = run.input_ids[position + 1 : position + 2]
        anchor = following[0] if len(following) else stepped[-1].logits[0].argmax()
        draft = session.draft(int(anchor))
        drafts["draft_ids"].append(np.asarray(draft.token_ids)[0])
        drafts["draft_logits"].append(np.asarray(draft.logits)[0])
        drafts["draft_confidence"].append(np.asarray(draft.confidence)[0])
    results = {
        "logits": _rows([r.logits for r in (*prefilled, *stepped)], len(run.input_ids)),
        "main_hidden": _rows([r.main_hidden for r in (*prefilled, *stepped)], len(run.input_ids)),
    }
    return results | {key: np.stack(v).astype(np.float32) for key, v in drafts.items() if v}


def _rows(parts: list[np.ndarray], count: int) -> np.ndarray:
    """Joins rows that end at `count`; rows before the first are NaN."""
    joined = np.concatenate(parts).astype(np.float32)
    missing = np.full((count - len(joined), joined.shape[1]), np.nan, np.float32)
    return np.concatenate([missing, joined])


def run_prompt(model: Model, run: ScoreRun, compute: Compute) -> Prompt:
    """The prefilled part of a run, with the embeddings of its image."""
    ids = run.input_ids[: run.prompt_length]
    if run.token_types is None or run.patches is None:
        return Prompt.of_text(ids)
    vision = model.config.vision
    assert vision is not None, "checked when the input was read"
    is_image = run.token_types[: run.prompt_length] != TokenType.TEXT
    span = image_span(model.params.vision, run.patches, *run.grid, vision, compute)
    embeds = np.zeros((len(ids), model.config.hidden_size), np.float32)
    embeds[is_image] = np.asarray(span, np.float32)
    return Prompt(ids, is_image, embeds)


def read_runs(source: Path, model: Model) -> Iterator[ScoreRun]:
    """The checked runs of a score input."""
    try:
        if source.stat().st_size > MAX_INPUT_BYTES:
            raise ScoreError(f"{source} is larger than {MAX_INPUT_BYTES} bytes")
        data = json.loads(source.read_bytes())
    except OSError as error:
        raise ScoreError(f"cannot read {source}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ScoreError(f"{source} is not valid JSON: {error}") from error
    runs = data.get("runs") if isinstance(data, dict) else None
    if not isinstance(runs, dict) or not runs:
        raise ScoreError(f'{source} must hold {{"runs": {{NAME: {{...}}}}}} with at least one run')
    for name, fields in runs.items():
        if not isinstance(fields, dict):
            raise ScoreError(f"runs.{name} must be an object")
        yield _read_run(name, fields, source.parent, model)


def _read_run(name: str, fields: dict[str, Any], folder: Path, model: Model) -> ScoreRun:
    unknown = set(fields) - {"input_ids", "prompt_length", *_IMAGE_FIELDS}
    if unknown:
        raise ScoreError(f"runs.{name}: unknown field {min(unknown)}")
    ids = _integers(name, "input_ids", fields.get("input_ids"), 0, model.config.vocab_size - 1)
    length = fields.get("prompt_length")
    if type(length) is not int or not 1 <= length <= len(ids):
        raise ScoreError(f"runs.{name}.prompt_length must be from 1 to {len(ids)}, not {length!r}")
    if len(ids) + model.config.dspark_block_size > model.config.max_position_embeddings:
        raise ScoreError(f"runs.{name}.input_ids exceed the context")
    given = [field for field in _IMAGE_FIELDS if fields.get(field) is not None]
    if not given:
        return ScoreRun(name, ids, length)
    if given != list(_IMAGE_FIELDS):
        missing = next(field for field in _IMAGE_FIELDS if field not in given)
        raise ScoreError(f"runs.{name}: an image needs {missing} too")
    if model.config.vision is None:
        raise ScoreError(f"runs.{name}: this checkpoint has no vision tower")
    types = _integers(name, "token_types", fields["token_types"], -1, max(TokenType))
    if len(types) not in (length, len(ids)):
        raise ScoreError(f"runs.{name}.token_types needs one entry per prompt token")
    grid = (fields["n_vit_h"], fields["n_vit_w"])
    if any(type(n) is not int or n < 1 for n in grid):
        raise ScoreError(f"runs.{name}: n_vit_h and n_vit_w must be positive integers")
    ratio = model.config.vision.downsample_ratio
    span = num_image_tokens(-(-grid[0] // ratio), -(-grid[1] // ratio))
    if int((types[:length] != TokenType.TEXT).sum()) != span:
        raise ScoreError(f"runs.{name}.token_types must mark {span} positions for this grid")
    patches = _read_patches(name, folder, fields["images"], fields["image_key"])
    side = model.config.vision.patch_size
    if patches.shape != (grid[0] * grid[1], IMAGE_CHANNELS, side, side):
        raise ScoreError(f"runs.{name}: {fields['image_key']} has shape {list(patches.shape)}")
    return ScoreRun(name, ids, length, types, patches, grid)


def _integers(name: str, field: str, value: Any, low: int, high: int) -> np.ndarray:
    ok = isinstance(value, list) and value and all(type(v) is int for v in value)
    if not ok or not low <= min(value) <= max(value) <= high:
        raise ScoreError(f"runs.{name}.{field} must be a list of integers from {low} to {high}")
    return np.array(value, np.int32)


def _read_patches(name: str, folder: Path, file: Any, key: Any) -> np.ndarray:
    if not isinstance(file, str) or not isinstance(key, str):
        raise ScoreError(f"runs.{name}: images and image_key must be text")
    try:
        with safetensors.safe_open(folder / file, "numpy") as tensors:
            return np.asarray(tensors.get_tensor(key), np.float32)
    except (OSError, safetensors.SafetensorError) as error:
        raise ScoreError(f"runs.{name}: cannot read {key} from {file}: {error}") from error
