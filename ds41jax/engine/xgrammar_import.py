"""xgrammar, with or without the packages that it declares.

xgrammar imports torch and transformers at the top of modules that we need, for names that we never
use. Where torch is installed this is the ordinary import. Where it is not, two stand-ins are lent
for the length of the import and the package's own `__init__`, which pulls in the parts that really
compute with torch, is passed over. That leans on the insides of another project, so its minor
version is pinned.
"""

import importlib
import importlib.metadata
import importlib.util
import re
import sys
import threading
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

SUPPORTED_VERSION = "0.2"
# The native library comes first: the others look their classes up in it.
_MODULES = ("load_binding", "exception", "compiler", "grammar", "matcher", "tokenizer_info")
_NAMES = {
    "compiler": ("CompiledGrammar", "GrammarCompiler"),
    "grammar": ("Grammar",),
    "matcher": ("GrammarMatcher",),
    "tokenizer_info": ("TokenizerInfo", "VocabType"),
}
_lock = threading.Lock()


def import_xgrammar() -> ModuleType:
    """The package xgrammar; in the light form it has the classes that ds41jax uses and no others.

    Raises:
      ImportError: if it is missing or of another minor version, saying what to install.
    """
    with _lock:
        _check_version()
        loaded = sys.modules.get("xgrammar")
        if loaded is not None:
            return loaded
        if importlib.util.find_spec("torch") and importlib.util.find_spec("transformers"):
            return importlib.import_module("xgrammar")
        return _import_light()


def _check_version() -> None:
    try:
        version = importlib.metadata.version("xgrammar")
    except importlib.metadata.PackageNotFoundError as error:
        raise ImportError(
            "constrained decoding needs xgrammar: pip install --no-deps -r requirements-guided.txt"
        ) from error
    if re.match(rf"{re.escape(SUPPORTED_VERSION)}\.\d", version) is None:
        raise ImportError(
            f"xgrammar {version} is installed, but ds41jax works with {SUPPORTED_VERSION}.*: "
            "pip install --no-deps -r requirements-guided.txt"
        )


def _import_light() -> ModuleType:
    # tvm_ffi decides what to do about torch at its own import; it must not meet the stand-in.
    importlib.import_module("tvm_ffi")
    spec = importlib.util.find_spec("xgrammar")
    if spec is None or spec.submodule_search_locations is None:
        raise ImportError("xgrammar has metadata but no package; install it again")
    lent = {"torch": _torch_stand_in(), "transformers": _transformers_stand_in()}
    kept = {name: sys.modules.get(name) for name in lent}
    package = _bare_package(spec)
    try:
        sys.modules.update(lent, xgrammar=package)
        for name in _MODULES:
            setattr(package, name, importlib.import_module(f"xgrammar.{name}"))
    except BaseException:
        for name in [n for n in sys.modules if n.partition(".")[0] == "xgrammar"]:
            del sys.modules[name]
        raise
    finally:
        for name, module in kept.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module
    for module_name, names in _NAMES.items():
        for name in names:
            setattr(package, name, getattr(getattr(package, module_name), name))
    return package


def _bare_package(spec: ModuleSpec) -> ModuleType:
    package = ModuleType("xgrammar")
    package.__path__ = list(spec.submodule_search_locations or ())
    package.__spec__ = spec
    package.__file__ = spec.origin
    return package


def _torch_stand_in() -> ModuleType:
    def nothing(*_args: Any, **_kwargs: Any) -> None:
        return None

    module = ModuleType("torch")
    module.__dict__.update(Tensor=object, int32="int32", tensor=nothing, full=nothing)
    return module


def _transformers_stand_in() -> ModuleType:
    module = ModuleType("transformers")
    for name in ("PreTrainedTokenizerBase", "PreTrainedTokenizerFast"):
        setattr(module, name, type(name, (), {}))
    return module
