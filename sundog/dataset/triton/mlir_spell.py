"""Write MLIR attributes, types and locations from their JSON values (see mlir_value.py)."""

from __future__ import annotations

import re
from typing import Any

Value = Any  # plain JSON

_ESCAPE = re.compile(rb'\\(\\|"|n|t|[0-9A-Fa-f]{2})')
_NAMED = {b"\\": b"\\", b'"': b'"', b"n": b"\n", b"t": b"\t"}
_SPELLING = {n: f"\\{n:02X}" for n in range(256) if not 0x20 <= n < 0x7F or n == 0x22}
_SPELLING[0x5C] = "\\\\"
_BARE = re.compile(r"[A-Za-z_][\w$.]*")
_SYMBOL = re.compile(r"[A-Za-z_][\w$.-]*")


def unescape(text: str) -> str:
    """Return the string that MLIR spells `text`; bytes that are not UTF-8 become surrogates."""
    if "\\" not in text:
        return text
    raw = text.encode("utf-8", "surrogateescape")
    raw = _ESCAPE.sub(lambda m: _NAMED.get(m[1]) or bytes.fromhex(m[1].decode()), raw)
    return raw.decode("utf-8", "surrogateescape")


def escape(text: str) -> str:
    """Return MLIR's spelling of a string, in quotes."""
    raw = text.encode("utf-8", "surrogateescape").decode("latin-1")  # a character for each byte
    return f'"{raw.translate(_SPELLING)}"'


def spell(value: Value) -> str:
    """Return the text of an attribute or a type."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, list):
        return f"[{_join(value)}]"
    if not isinstance(value, dict) or value.get("kind") not in _SPELLERS:
        raise ValueError(f"not a value of an IR record: {value!r}")
    return _SPELLERS[value["kind"]](value)


def spell_entries(entries: dict[str, Value]) -> str:
    """`name = value` pairs, in braces."""
    spelled = []
    for name, value in entries.items():
        key = name if _BARE.fullmatch(name) else escape(name)
        spelled.append(key if value == "unit" else f"{key} = {spell(value)}")
    return "{" + ", ".join(spelled) + "}"


def spell_location(location: Value) -> str:
    """Return the text inside `loc(...)`."""
    kind = location["kind"]
    if kind == "unknown":
        return "unknown"
    if kind == "file":
        end = ""
        if "end_column" in location:
            end = f" to {location.get('end_line', '')}:{location['end_column']}"
        return f"{escape(location['file'])}:{location['line']}:{location['column']}{end}"
    if kind == "name":
        child = location["child"]
        inner = "" if child["kind"] == "unknown" else f"({spell_location(child)})"
        return escape(location["name"]) + inner
    if kind == "callsite":
        callee, caller = spell_location(location["callee"]), spell_location(location["caller"])
        return f"callsite({callee} at {caller})"
    if kind == "fused":
        metadata = f"<{spell(location['metadata'])}>" if "metadata" in location else ""
        parts = ", ".join(spell_location(part) for part in location["parts"])
        return f"fused{metadata}[{parts}]"
    raise ValueError(f"not a location of an IR record: {location!r}")


def _join(values: list[Value]) -> str:
    return ", ".join(spell(value) for value in values)


def _typed(value: dict[str, Value], text: str) -> str:
    return f"{text} : {spell(value['type'])}" if "type" in value else text


def _dims(value: dict[str, Value]) -> str:
    return "x".join("?" if size is None else str(size) for size in value["shape"])


def _shaped(value: dict[str, Value]) -> str:
    element = spell(value["element"])
    return f"{_dims(value)}x{element}" if value["shape"] else element


def _tensor(value: dict[str, Value]) -> str:
    encoding = f", {spell(value['encoding'])}" if "encoding" in value else ""
    return f"tensor<{_shaped(value)}{encoding}>"


def _function(value: dict[str, Value]) -> str:
    outputs = value["outputs"]
    # A function type as the only result needs its brackets, or `->` would bind to the right.
    bare = len(outputs) == 1 and not (isinstance(outputs[0], dict) and "inputs" in outputs[0])
    spelled = spell(outputs[0]) if bare else f"({_join(outputs)})"
    return f"({_join(value['inputs'])}) -> {spelled}"


def _dense_array(value: dict[str, Value]) -> str:
    values = f": {_join(value['values'])}" if value["values"] else ""
    return f"array<{spell(value['element'])}{values}>"


def _dense(value: dict[str, Value]) -> str:
    values = "" if value["values"] is None else spell(value["values"])
    return _typed(value, f"dense<{values}>")


def _symbol(value: dict[str, Value]) -> str:
    path = value["path"]
    return "::".join("@" + (name if _SYMBOL.fullmatch(name) else escape(name)) for name in path)


def _params(params: list[Value]) -> str:
    # The paddings of #ttg.padded_shared have no comma after them.
    padded = bool(params) and isinstance(params[0], dict) and params[0]["kind"] == "paddings"
    return " ".join([spell(params[0]), _join(params[1:])]).rstrip() if padded else _join(params)


def _dialect(value: dict[str, Value]) -> str:
    if "fields" in value:
        return f"{value['name']}<{spell_entries(value['fields'])}>"
    if "params" in value:
        return f"{value['name']}<{_params(value['params'])}>"
    return str(value["name"])


_SPELLERS = {
    "int": lambda v: _typed(v, str(v["value"])),
    "float": lambda v: _typed(v, v["value"]),
    "string": lambda v: _typed(v, escape(v["value"])),
    "symbol": _symbol,
    "dict": lambda v: spell_entries(v["entries"]),
    "dense_array": _dense_array,
    "dense": _dense,
    "alias": lambda v: v["name"],
    "dialect": _dialect,
    "tensor": _tensor,
    "function": _function,
    "shaped": _shaped,
    "shape": _dims,
    "field": lambda v: f"{v['name']} = {spell(v['value'])}",
    "paddings": lambda v: f"[{', '.join(f'{step}:+{padding}' for step, padding in v['pairs'])}]",
    "opaque": lambda v: _typed(v, v["spelling"]),
}
VALUE_KINDS = tuple(_SPELLERS)
LOCATION_KINDS = ("unknown", "file", "name", "callsite", "fused")
