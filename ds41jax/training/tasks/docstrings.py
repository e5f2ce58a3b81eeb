"""Questions about the Python standard library, answered from its docstrings."""

import importlib
import inspect
import random
import re
from functools import cache

from ds41jax.training.tasks.example import Check, Example, build, casual, fill

MODULES = """abc argparse array ast asyncio base64 binascii bisect builtins bz2 calendar cmath
codecs collections colorsys configparser contextlib copy csv dataclasses datetime decimal difflib
dis enum filecmp fileinput fnmatch fractions functools gc getpass glob graphlib gzip hashlib heapq
hmac html importlib inspect io ipaddress itertools json keyword linecache locale logging lzma math
mimetypes operator os os.path pathlib pickle pkgutil platform pprint queue random re sched secrets
select selectors shelve shlex shutil signal socket sqlite3 stat statistics string struct subprocess
sys sysconfig tarfile tempfile textwrap threading time timeit tokenize traceback types typing
unicodedata urllib.parse urllib.request uuid warnings weakref xml.etree.ElementTree zipfile
zlib""".split()
_ASK = (
    "What does {x} do?",
    "What does {x} do in Python?",
    "what does {x} do",
    "What is {x}?",
    "Explain {x}.",
    "What is {x} for?",
    "Describe {x}.",
    "Tell me what {x} does.",
)
_UNWANTED = re.compile(r"@|http|author|copyright|\bby [A-Z]|[^\x00-\x7f]|<|Mr|Dr\.", re.IGNORECASE)
_SENTENCE_END = re.compile(r"(?<![ .]\w)(?<!etc)\.\s")  # not the stop of "e.g." or "etc."
_SIGNATURE = re.compile(
    r"^[\w.]+\(.*?\)\s*(->\s*.*?)?\s*(--?|—|:)?\s*$|^[\w.]+\(.*?\)\s*(->|--?)\s*"
)
MAX_SUMMARY = 200


def docstrings(rng: random.Random) -> Example:
    """Scored on the exact sentence."""
    return about(rng, *rng.choice(pairs()))


def about(rng: random.Random, name: str, summary: str) -> Example:
    """The question what a name means, with its summary as the answer."""
    request = casual(rng, fill(rng, _ASK, x=name))
    reasoning = f"{name} belongs to Python." if "." not in name else (
        f"{name} is in {name.rsplit('.', 1)[0]}."
    )  # fmt: skip
    return build("docstrings", rng, request, summary, reasoning, Check("equals", summary), 0.35)


@cache
def pairs() -> tuple[tuple[str, str], ...]:
    """Names of the standard library and the first sentences of their docstrings, in order."""
    found: dict[str, str] = {}
    for module_name in MODULES:
        module = importlib.import_module(module_name)
        _add(found, module_name, module)
        prefix = "" if module_name == "builtins" else f"{module_name}."
        for name in sorted(getattr(module, "__all__", dir(module))):
            value = getattr(module, name, None)
            if name.startswith("_") or inspect.ismodule(value) or not callable(value):
                continue
            _add(found, prefix + name, value)
            if module_name in ("builtins", "collections", "pathlib") and inspect.isclass(value):
                for method in sorted(vars(value)):
                    if not method.startswith("_"):
                        _add(found, f"{prefix}{name}.{method}", getattr(value, method, None))
    return tuple(sorted(found.items()))


def _add(found: dict[str, str], name: str, value: object) -> None:
    doc = getattr(value, "__doc__", None)
    text = summary(doc) if isinstance(doc, str) else None
    if text is not None:
        found[name] = text


def summary(doc: str) -> str | None:
    """The first sentence of a docstring as one line; None if it has none worth telling."""
    first = inspect.cleandoc(doc).split("\n\n")[0]
    text = _SIGNATURE.sub("", " ".join(first.split())).strip()
    text = _SENTENCE_END.split(text)[0].rstrip(".:; ") + "."
    if not 12 < len(text) <= MAX_SUMMARY or len(text.split()) < 3 or _UNWANTED.search(text):
        return None
    if not text[0].isalpha() or "(" in text.split(" ")[0]:
        return None
    return text[0].upper() + text[1:]
