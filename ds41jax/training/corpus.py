"""Texts for plain language modelling: source code and documentation found on this machine.

Only files of permissively licensed distributions are read. Licence texts, author lists, change
logs, tests and data are left out, and so is every line that names a person or an address.
"""

import hashlib
import importlib.metadata
import json
import lzma
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PERMISSIVE = re.compile(
    r"\b(MIT|Expat|BSD|Apache|PSF|Python Software Foundation|ISC|0BSD|Unlicense|Zlib)\b", re.I
)
_RESTRICTED = re.compile(
    r"GPL|MPL|Mozilla|EUPL|CDDL|Proprietary|NVIDIA|Creative|CC-BY|Artistic", re.I
)
_SUFFIXES = (".py", ".pyi", ".md", ".rst", ".txt")
_SKIPPED_PATH = re.compile(
    r"(^|/)(tests?|testing|testdata|_?vendor(ed)?|third_party|locale|data|lib2to3|idlelib|"
    r"turtledemo|node_modules|site-packages|__pycache__|[\w.-]*dist-info)(/|$)|"
    r"(^|/)(test_\w*|\w*_test|conftest|copying|license|licence|notice|authors?|credits|contributors?|"
    r"thanks|changes|changelog|history|news|top_level|entry_points|requirements[\w-]*)\.\w+$",
    re.I,
)
_SKIPPED_PACKAGES = {"faker", "tzdata", "ds41jax", "wcwidth", "pyxdg"}  # names, tables, ourselves
_PERSONAL = re.compile(
    r"copyright|\bauthors?\b|__author|maintainer|\(c\)|licen[cs]|warrant|@[\w-]+\.\w|et al\b|"
    r"(written|contributed|reported|suggested|patch|invented|implemented|based on \w+) by\b|thanks|"
    r"credit|:user:|signed-off|\bDr\.|\bMr\.|\bProf|://",
    re.I | re.ASCII,
)
_INITIALS = re.compile(r"\b[A-Z]\. ?(?:[A-Z]\. ?)*[A-Z][a-z]{2,}|\b[A-Z][a-z]{2,}, [A-Z]\.")
# Given names that are no English or Python words: credits often name people without their rights.
_GIVEN_NAMES = """Aaron Adrian Alan Albert Alex Alexander Alexandre Alice Amaury Andreas Andrew
André Andy Anna Anthony Antoine Armin Arthur Barry Benjamin Bernd Bob Brett Brian Bruce Carl
Carlos Charles Charlie Chris Christian Christopher Claudia Daniel Darrell David Dennis Donald Doug
Edward Elena Emily Eric Erik Ezio Facundo Felix Florian Francis Frank Franklin Fred Fredrik
Gabriel Gary Geoff Georg George Gerhard Greg Gregory Guido Gustavo Hans Harry Helen Henry Hugo
Hynek Ian Ivan Jack Jacob Jake Jakub James Jane Jason Jean Jeff Jeffrey Jennifer Jeremy Jerry
Jesse Jim Joan Joe Joel Johan Johannes John Jonathan Jose Joseph Josh Juan Julia Justin Karen Karl
Kathy Keith Ken Kenneth Kevin Knuth Kurt Larry Laura Lars Lennart Linda Linus Lisa Louis Lucas
Luis Lukas Luke Marc Marcel Marco Margaret Maria Marie Mario Martin Mary Matt Matthew Matthias
Maurice Michael Michel Miguel Mike Nathan Neil Nicholas Nicolas Nick Oleg Oliver Olivier Oscar
Pablo Patrick Paul Pauli Pedro Peter Petri Phil Philip Philipp Pierre Piers Rachel Ralf Raymond
Rebecca Ricardo Richard Rob Robert Roger Roland Ronald Ronny Russell Ryan Samuel Sandra Sarah
Scott Sean Sebastian Serhiy Simon Sjoerd Stefan Stephan Stephen Steve Steven Stuart Susan Sven Ted
Terry Thomas Tim Timothy Todd Tom Tony Travis Trent Victor Vincent Vinay Walter Wolfgang Yury
Zachary Smith Doe Rossum Warsaw Hettinger""".split()
_NAMED = re.compile(rf"\b(?:{'|'.join(_GIVEN_NAMES)})\b")
_REFERENCE = re.compile(r"^\s*(\.\. )?\[\d+\]\s")
MAX_FILE_BYTES, MIN_FILE_BYTES = 200_000, 300
MAX_PACKAGE_BYTES = 2_000_000
MAX_STANDARD_BYTES = 6_000_000  # of the standard library
HELD_OUT_ONE_IN = 50


@dataclass(frozen=True)
class Source:
    """A distribution whose files may be used."""

    name: str
    version: str
    licence: str
    files: tuple[Path, ...]


@dataclass(frozen=True)
class Text:
    """A cleaned file. `held_out` goes by the hash of its contents."""

    source: str
    path: str
    text: str
    held_out: bool


def find_sources(site_packages: Path, documentation: Path) -> list[Source]:
    """Permissively licensed distributions, the standard library and Debian packages, by name."""
    sources = [*_distributions(site_packages), _standard_library(), *_debian(documentation)]
    return sorted(sources, key=lambda source: source.name)


def read_texts(sources: list[Source]) -> Iterator[Text]:
    """Cleaned, deduplicated files, of no source more than a limit."""
    seen: set[bytes] = set()
    for source in sources:
        taken = 0
        limit = MAX_STANDARD_BYTES if source.name == "python" else MAX_PACKAGE_BYTES
        for file in sorted(source.files, key=_shuffle_key):
            text = clean(_read(file), code=file.suffix in (".py", ".pyi"))
            digest = hashlib.sha256(text.encode()).digest()
            if not _usable(text) or digest in seen or taken + len(text) > limit:
                continue
            seen.add(digest)
            taken += len(text)
            held_out = digest[0] + 256 * digest[1] < 65536 // HELD_OUT_ONE_IN
            yield Text(source.name, "/".join(file.parts[-3:]), text, held_out)


def write_corpus(path: Path, sources: list[Source], texts: list[Text]) -> None:
    """Writes one compressed file from which another machine makes the same rows."""
    lines: list[Any] = [[[s.name, s.version, s.licence] for s in sources]]
    lines += [[t.source, t.path, t.text, t.held_out] for t in texts]
    with lzma.open(path, "wt", preset=9 | lzma.PRESET_EXTREME, encoding="utf-8") as archive:
        archive.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)


def read_corpus(path: Path) -> tuple[list[Source], list[Text]]:
    """What `write_corpus` wrote; the sources are without their files."""
    with lzma.open(path, "rt", encoding="utf-8") as archive:
        sources = [Source(n, v, licence, ()) for n, v, licence in json.loads(next(archive))]
        return sources, [Text(*json.loads(line)) for line in archive]


def clean(text: str, code: bool) -> str:
    """The text without a licence header, references, and lines that name people or addresses."""
    lines = text.replace("\r\n", "\n").split("\n")
    if code:
        lines = lines[_header_length(lines) :]
    kept: list[str] = []
    in_reference = False
    for line in lines:
        indent = len(line) - len(line.lstrip())
        if _REFERENCE.match(line):
            in_reference, reference_indent = True, indent
            continue
        if in_reference and line.strip() and indent > reference_indent:
            continue
        in_reference = False
        if not _names_someone(line):
            kept.append(line.rstrip())
    return re.sub(r"\n{4,}", "\n\n\n", "\n".join(kept)).strip("\n") + "\n"


def _names_someone(line: str) -> bool:
    return any(pattern.search(line) for pattern in (_PERSONAL, _INITIALS, _NAMED))


def _header_length(lines: list[str]) -> int:
    """Lines of an opening comment that speaks of rights."""
    end = 0
    while end < len(lines) and (lines[end].startswith("#") or not lines[end].strip()):
        end += 1
    return end if re.search(r"copyright|licen[cs]e", "\n".join(lines[:end]), re.I) else 0


def _usable(text: str) -> bool:
    """No table of numbers, no packed data, mostly ASCII."""
    if len(text) < MIN_FILE_BYTES:
        return False
    lines = text.split("\n")
    digits = sum(map(str.isdigit, text))
    return (
        max(map(len, lines)) < 500
        and len(text) / len(lines) < 90
        and digits < 0.1 * len(text)
        and sum(letter > "\x7f" for letter in text) < 0.01 * len(text)
    )


def _read(file: Path) -> str:
    """Contents of a small UTF-8 file, "" of any other."""
    try:
        if not MIN_FILE_BYTES < file.stat().st_size < MAX_FILE_BYTES:
            return ""
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


def _shuffle_key(file: Path) -> str:
    """An order that does not favour a folder when a package is cut off."""
    return hashlib.sha256("/".join(file.parts[-4:]).encode()).hexdigest()


def _wanted(path: str) -> bool:
    return path.endswith(_SUFFIXES) and not _SKIPPED_PATH.search(path)


def _distributions(folder: Path) -> Iterator[Source]:
    for found in importlib.metadata.distributions(path=[str(folder)]):
        name = found.metadata["Name"]
        licence = _licence(found.metadata)
        if name.lower() in _SKIPPED_PACKAGES or licence is None:
            continue
        files = [folder / str(file) for file in found.files or () if _wanted(str(file))]
        yield Source(name, found.version, licence, tuple(files))


def _licence(metadata: importlib.metadata.PackageMetadata) -> str | None:
    """The declared licence if it is permissive."""
    classifiers = [c for c in metadata.get_all("Classifier") or [] if c.startswith("License ::")]
    said = [
        *(metadata.get_all("License-Expression") or []),
        *(c.rsplit("::", 1)[-1] for c in classifiers),
    ]
    said += [text.strip().split("\n")[0][:60] for text in metadata.get_all("License") or []]
    text = "; ".join(dict.fromkeys(part.strip() for part in said if part and part.strip()))
    return text if PERMISSIVE.search(text) and not _RESTRICTED.search(text) else None


def _standard_library() -> Source:
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = [file for file in folder.rglob("*.py") if _wanted(str(file.relative_to(folder)))]
    return Source("python", sysconfig.get_python_version(), "PSF-2.0", tuple(files))


def _debian(folder: Path) -> Iterator[Source]:
    """Packages whose machine-readable copyright file names permissive licences only."""
    for package in sorted(folder.iterdir()) if folder.is_dir() else ():
        licences = sorted(set(re.findall(r"^License: *(\S+)", _copyright(package), re.M)))
        if not licences or not all(PERMISSIVE.search(name) for name in licences):
            continue
        if any(_RESTRICTED.search(name) for name in licences):
            continue
        files = [f for f in package.rglob("*") if f.is_file() and _is_document(f)]
        if files:
            yield Source(f"debian:{package.name}", "", ", ".join(licences), tuple(files))


def _copyright(package: Path) -> str:
    file = package / "copyright"
    return file.read_text(errors="replace") if file.is_file() else ""


def _is_document(file: Path) -> bool:
    plain = file.suffix in (".md", ".rst", ".txt") or file.name == "README"
    return plain and not _SKIPPED_PATH.search(file.name)
