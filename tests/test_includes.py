"""Each file of the native part includes what it uses, or a header of ours that does. No build would tell: the library's
headers are precompiled, and several files are compiled at once."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest

from tests.harness import ROOT

SHIM = ROOT / "shim"
LISTED = re.compile(r"target_precompile_headers\(\$\{target\} PRIVATE ([^)]*)\)")
# What a header declares and others need not; by the header.
DECLARES = {
    "algorithm": r"all_of|any_of|none_of|copy_n|copy_if|clamp|equal|fill|fill_n|find|find_if|lower_bound|max|min|"
    r"max_element|min_element|partial_sort|remove_if|replace|reverse|rotate|search|sort|stable_sort|unique|upper_bound",
    "array": r"array|to_array",
    "atomic": r"atomic|atomic_flag|atomic_ref|atomic_thread_fence|memory_order_\w+",
    "chrono": r"chrono",
    "condition_variable": r"condition_variable|condition_variable_any|cv_status",
    "deque": r"deque",
    "functional": r"function|bind|mem_fn|reference_wrapper|invoke",
    "future": r"future|promise|packaged_task|async|shared_future",
    "map": r"map|multimap",
    "memory": r"unique_ptr|shared_ptr|weak_ptr|make_unique|make_shared|enable_shared_from_this",
    "mutex": r"mutex|recursive_mutex|timed_mutex|lock_guard|unique_lock|scoped_lock|call_once|once_flag",
    "optional": r"optional|nullopt|make_optional",
    "set": r"set|multiset",
    "span": r"span|as_bytes|as_writable_bytes",
    "string": r"string|to_string|stoi|stol|stoul|stoull|getline",
    "string_view": r"string_view",
    "thread": r"thread|jthread|this_thread",
    "tuple": r"tuple|tie|make_tuple|forward_as_tuple|apply|tuple_size_v|tuple_size|tuple_element_t",
    "unordered_map": r"unordered_map|unordered_multimap",
    "utility": r"move|forward|exchange|swap|pair|make_pair|as_const|in_place|index_sequence\w*|make_index_sequence",
    "vector": r"vector",
    "bit": r"bit_cast|bit_ceil|bit_floor|bit_width|countr_zero|countl_zero|popcount|has_single_bit|endian",
    "charconv": r"from_chars|to_chars",
    "cstdio": r"fopen|fclose|fprintf|printf|snprintf|fputs|fread|fwrite|FILE|perror|remove|rename",
    "cstdlib": r"abort|exit|_Exit|getenv|strtol|strtoul|strtoull|malloc|free|atoi|quick_exit",
    "cstring": r"memcpy|memmove|memset|memcmp|strlen|strcmp|strncmp|strchr|strrchr|strerror|strstr",
    "filesystem": r"filesystem",
    "iterator": r"back_inserter|inserter|make_move_iterator",
    "limits": r"numeric_limits",
    "numeric": r"accumulate|iota|reduce|gcd|lcm|midpoint",
    "type_traits": r"(?:is|remove|add|enable|make)_\w+_[vt]|conditional_t|decay_t|underlying_type_t",
    "variant": r"variant|visit|holds_alternative|get_if|monostate",
}
USES = {header: re.compile(rf"\bstd::(?:{names})\b") for header, names in DECLARES.items()}
# What a header includes as the standard has it, or declares, too.
BRINGS = {
    "string": {"string_view"}, "sstream": {"string"}, "fstream": {"string"}, "iostream": {"string"},
    "regex": {"string"}, "filesystem": {"string"},
    "nlohmann/json.hpp": {"string", "string_view", "vector", "map", "memory"},
} | {
    one: {"utility"}
    for one in ("algorithm", "array", "deque", "functional", "map", "memory", "optional", "set", "tuple", "vector")
}  # fmt: skip
INCLUDE = re.compile(r'^\s*#\s*include\s+(?:"([^"]+)"|<([^>]+)>)', re.MULTILINE)
COMMENTS = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', re.DOTALL)


# Types that one header of ours defines, and none that files name their own by.
DEFINES = re.compile(r"^(?:template <[^>]*>\n)?(?:class|struct|enum class) (\w{4,})[^;(]*\{", re.MULTILINE)
DECLARES_OURS = re.compile(r"\b(?:class|struct|enum|using|typename) (?:class |alignas\([^)]*\) )?(\w+)")


@functools.cache
def defined() -> dict[str, Path]:
    found: dict[str, list[Path]] = {}
    for path in sorted(SHIM.rglob("*")):
        if path.suffix in (".h", ".cc"):
            for name in DEFINES.findall(path.read_text()):
                found.setdefault(name, []).append(path)
    return {name: paths[0] for name, paths in found.items() if len(paths) == 1 and paths[0].suffix == ".h"}


@functools.cache
def our_headers(path: Path) -> frozenset[Path]:
    """It, and what it includes of ours."""
    found = {path}
    for ours, _ in INCLUDE.findall(path.read_text()):
        for folder in (path.parent, SHIM, SHIM / "include"):
            if ours and (folder / ours).exists():
                found |= our_headers((folder / ours).resolve())
                break
    return frozenset(found)


@functools.cache
def declared(path: Path) -> frozenset[str]:
    return frozenset(DECLARES_OURS.findall(path.read_text()))


def missing_types(path: Path) -> list[str]:
    """Types of ours that it uses and that no header which it includes defines or declares."""
    has = our_headers(path)
    used = set(re.findall(r"\b[A-Z]\w{3,}\b", COMMENTS.sub("", path.read_text())))
    used -= frozenset().union(*map(declared, has))
    return sorted(name for name in used if name in defined() and defined()[name] not in has)


@functools.cache
def library_headers(path: Path) -> frozenset[str]:
    """What this file has of the library, itself or through headers of ours."""
    found: set[str] = set()
    for ours, library in INCLUDE.findall(path.read_text()):
        if library:
            found |= {library} | BRINGS.get(library, set())
            continue
        for folder in (path.parent, SHIM, SHIM / "include"):
            if (folder / ours).exists():
                found |= library_headers((folder / ours).resolve())
                break
    return frozenset(found)


def missing(path: Path) -> list[str]:
    text = COMMENTS.sub("", path.read_text())
    has = library_headers(path)
    return [header for header, uses in USES.items() if header not in has and uses.search(text)]


def test_every_precompiled_header_is_looked_for() -> None:
    listed = LISTED.search((SHIM / "CMakeLists.txt").read_text())
    assert listed is not None
    assert set(re.findall(r"<(\w+)>", listed[1])) <= set(DECLARES)


@pytest.mark.parametrize("folder", sorted({path.parent.relative_to(SHIM) for path in SHIM.rglob("*.cc")}), ids=str)
def test_what_is_used_is_included(folder: Path) -> None:
    files = [path for path in sorted((SHIM / folder).iterdir()) if path.suffix in (".cc", ".h")]
    assert {path.name: found for path in files if (found := missing(path) + missing_types(path))} == {}


def test_a_missing_one_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.h").write_text("#include <map>\n")
    file = tmp_path / "a.cc"
    file.write_text('#include "a.h"\nstd::map<int, std::pair<int, int>> a;  // std::set\nstd::vector<int> b;\n')
    assert missing(file) == ["vector"]


def test_a_missing_type_is_found(tmp_path: Path) -> None:
    assert "Executor" in defined()
    (tmp_path / "uses.cc").write_text("void f(Executor& executor);\n")
    (tmp_path / "declares.cc").write_text("class Executor;\nvoid f(Executor& executor);\n")
    assert missing_types(tmp_path / "uses.cc") == ["Executor"]
    assert missing_types(tmp_path / "declares.cc") == []
