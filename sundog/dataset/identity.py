"""Describe a run, and hash its ids.

    info = describe_run(kernel, {"x": x, "y": y}, codegen_settings={"static_shapes": True})
    info.kernel_id, info.run_id

| id | hash of |
|---|---|
| kernel_id | kernel source, what it calls and captures, code-generation settings |
| run_id | kernel_id, arguments, world, backend, hardware, versions that change code |
| sample_id | run_id, config |

Every id can be computed again from the record alone: `validate` does.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .hardware import hardware, versions
from .ir_graph import canonical_json
from .kernel_source import kernel_source
from .plain import is_tensor, plain, type_name

log = logging.getLogger("sundog.dataset")

# The fields of hardware and versions that change the code or the time; a drifting clock does not.
_HARDWARE_IDENTITY = ("kind", "name", "capability", "num_sms")
_VERSION_IDENTITY = ("torch", "triton", "helion", "cuda", "hip")


@dataclasses.dataclass(frozen=True)
class RunInfo:
    """What was tuned, and on what. It is plain JSON; a null is what could not be found out."""

    kernel_name: str
    kernel_source: list[dict[str, Any]] | None = None
    codegen_settings: dict[str, Any] | None = None
    arguments: list[dict[str, Any]] | None = None
    settings: dict[str, Any] | None = None
    world: int = 1
    backend: str | None = None
    hardware: dict[str, Any] | None = None
    versions: dict[str, Any] | None = None

    @property
    def kernel_id(self) -> str:
        return kernel_id_of(dataclasses.asdict(self))

    @property
    def run_id(self) -> str:
        return run_id_of(dataclasses.asdict(self))

    def input_shapes(self) -> list[list[Any]]:
        """Return the shapes of the tensors among the arguments, in order."""
        return [a["shape"] for a in self.arguments or () if a.get("kind") == "tensor"]


def describe_run(
    kernel: object,
    args: Mapping[str, object] | Sequence[object],
    *,
    codegen_settings: Mapping[str, object] | None = None,
    settings: Mapping[str, object] | None = None,
    world: int = 1,
    backend: str | None = None,
    kernel_name: str | None = None,
) -> RunInfo:
    """Describe everything that identifies a run. What fails becomes null, with one warning."""
    name = kernel_name or getattr(getattr(kernel, "fn", kernel), "__name__", type_name(kernel))
    return RunInfo(
        kernel_name=str(name),
        kernel_source=_try(f"the source of {name}", lambda: kernel_source(kernel)),
        codegen_settings=_try("settings", lambda: plain(codegen_settings or {})),
        arguments=_try(f"the arguments of {name}", lambda: _describe_arguments(args)),
        settings=_try("settings", lambda: plain(settings or {})),
        world=int(world),
        backend=backend,
        hardware=_try("the hardware", hardware),
        versions=_try("the versions", versions),
    )


def _try(what: str, find: Callable[[], Any]) -> Any:
    try:
        return find()
    except Exception as error:  # collection never breaks tuning
        log.warning("could not record %s: %s: %s", what, type(error).__name__, error)
        return None


def _describe_arguments(args: Mapping[str, object] | Sequence[object]) -> list[dict[str, Any]]:
    named = args if isinstance(args, Mapping) else {str(i): v for i, v in enumerate(args)}
    return [{"name": str(name), **describe_value(value)} for name, value in named.items()]


def describe_value(value: object) -> dict[str, Any]:
    """Describe an argument: a tensor's layout, a function's source, items, or a value."""
    if is_tensor(value):
        return _describe_tensor(value)
    if isinstance(value, Mapping):
        items = [{"name": str(k), **describe_value(v)} for k, v in value.items()]
        return {"kind": "items", "type": type_name(value), "items": items}
    if isinstance(value, (list, tuple)):
        items = [describe_value(item) for item in value]
        return {"kind": "items", "type": type_name(value), "items": items}
    if isinstance(value, types.FunctionType) or callable(getattr(value, "fn", None)):
        return {"kind": "function", "source": kernel_source(value)}
    if callable(value) and not isinstance(value, type):
        return {"kind": "function", "type": type_name(value), "source": kernel_source(value)}
    return {"kind": "value", "type": type_name(value), "value": plain(value)}


def _describe_tensor(tensor: Any) -> dict[str, Any]:
    stride = tensor.stride() if callable(getattr(tensor, "stride", None)) else None
    device = getattr(getattr(tensor, "device", None), "type", None)
    return {
        "kind": "tensor",
        "dtype": str(tensor.dtype),
        "shape": [_dim(size) for size in tensor.shape],
        "stride": None if stride is None else [_dim(step) for step in stride],
        "device": device,
        "alignment": _alignment(tensor, device),
    }


def _dim(size: object) -> int | str:
    try:
        return int(size)  # type: ignore[call-overload]
    except Exception:  # a symbolic size that has no value
        return str(size)


def _alignment(tensor: Any, device: str | None) -> int | None:
    """Return the pointer's alignment in bytes, up to 16: Triton compiles other code for less."""
    if device == "meta" or "Fake" in type(tensor).__name__:
        return None
    try:
        address = tensor.data_ptr()
    except Exception:  # no storage
        return None
    return min(16, address & -address) if address else None


def config_json(config: object) -> str:
    """Return a configuration (mapping, dataclass) as the JSON that sample_id is hashed from.

    Raises ValueError for one that JSON cannot hold, such as a list in itself.
    """
    return canonical_json(plain(config, exact=True))


def kernel_id_of(record: Mapping[str, Any]) -> str:
    source = record["kernel_source"]
    if source is None:  # not found, so the name must tell kernels apart
        source = record["kernel_name"]
    else:
        # A function's place and its decorators do not change what it computes.
        source = [
            [item["text"] or item["name"], item["captures"], item["options"]] for item in source
        ]
    return _digest("kernel", source, record["codegen_settings"])


def run_id_of(record: Mapping[str, Any]) -> str:
    hardware, versions = record["hardware"] or {}, record["versions"] or {}
    return _digest(
        "run",
        kernel_id_of(record),
        _identity_of(record["arguments"]),
        record["world"],
        record["backend"],
        [hardware.get(name) for name in _HARDWARE_IDENTITY],
        [versions.get(name) for name in _VERSION_IDENTITY],
    )


def _identity_of(value: Any) -> Any:
    """Return the arguments without the paths of functions among them."""
    if isinstance(value, dict):
        return {k: _identity_of(v) for k, v in value.items() if k != "path"}
    return [_identity_of(v) for v in value] if isinstance(value, list) else value


def sample_id_of(run_id: str, config: str) -> str:
    """`config` is its JSON, as `config_json` writes it."""
    return _digest("sample", run_id, config)


def _digest(*parts: object) -> str:
    return hashlib.sha256(canonical_json(parts).encode()).hexdigest()
