"""Machine descriptions: what ships is whole, and a wrong one is refused by its field's name."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sundog.hardware.description import HOW, known, parse, plain, read

SHIPPED = {
    "h100x8": 8,
    "h200-pcie": None,
    "h200-shared": None,
    "h200x8": 8,
    "h200x8-2nodes": 16,
    "mi300x8": 8,
}


def test_these_machines_ship() -> None:
    assert {name: read(name).most_ranks for name in known()} == SHIPPED


@pytest.mark.parametrize("name", sorted(SHIPPED))
def test_every_figure_has_a_source_and_a_date(name: str) -> None:
    made = read(name)
    assert len(made.sources) >= 20
    for field, source in made.sources.items():
        assert source.text.split(":")[0] in HOW, field
        assert len(source.text.partition(":")[2]) > 8, f"{field}: say where it comes from"
        assert source.date.startswith("2026-"), field


@pytest.mark.parametrize("name", sorted(SHIPPED))
def test_what_is_written_is_what_is_read(name: str, tmp_path: Path) -> None:
    path = tmp_path / "again.json"
    path.write_text(json.dumps(plain(read(name))))
    assert read(str(path)) == read(name)


def _drop(*path: str) -> Callable[[dict], None]:
    def change(data: dict) -> None:
        for key in path[:-1]:
            data = data[key]
        del data[path[-1]]

    return change


def _set(value: Any, *path: str) -> Callable[[dict], None]:
    def change(data: dict) -> None:
        for key in path[:-1]:
            data = data[key]
        data[path[-1]] = value

    return change


def _pairs(rows: list) -> Callable[[dict], None]:
    return _set(
        {"value": rows, "source": "measured: a test", "date": "2026-11-16"}, "link", "pair_rates"
    )


RATES = (1e10, 1e10, 1e10)
WRONG = [
    (_drop("gpu", "launch_s"), "gpu.launch_s is missing"),
    (_drop("gpu"), "gpu is missing"),
    (_drop("link", "rate", "source"), "link.rate.source is missing"),
    (_set("guessed: by me", "link", "rate", "source"), "link.rate.source is 'guessed"),
    (_set("assumed", "link", "rate", "source"), "link.rate.source is 'assumed'"),
    (_set(-1.0, "gpu", "load_s", "value"), "gpu.load_s is -1.0, and it must be positive"),
    (_set(0.0, "link", "rate", "value"), "link.rate is 0.0"),
    (_set("fast", "gpu", "read_rate", "value"), "gpu.read_rate is 'fast', expected a number"),
    (_set(float("nan"), "gpu", "read_rate", "value"), "gpu.read_rate is nan"),
    (_set(True, "gpu", "read_rate", "value"), "gpu.read_rate is True"),
    (_set(132.0, "gpu", "num_sms", "value"), "gpu.num_sms is 132.0, expected a whole number"),
    (_set([[2, 1], [1, 1]], "gpu", "matmul_rate", "value"), "gpu.matmul_rate: expected growing"),
    (_set([3], "gpu", "matmul_rate", "value"), "gpu.matmul_rate: expected a list"),
    (_set(1.0, "gpu", "cache_rate", "value"), "gpu.cache_rate is 1, less than gpu.read_rate"),
    (_set(9e12, "gpu", "copy_rate", "value"), "gpu.copy_rate is 9e+12, twice gpu.write_rate"),
    (_set(9e12, "link", "pair_rate", "value"), "link.pair_rate is 9e+12, more than link.rate"),
    (_set("ring", "link", "kind"), "link.kind is 'ring', expected one of none, switch"),
    (_set("none", "link", "kind"), "gpus 0 and 1 do not reach each other"),
    (_set(2, "nodes"), "nodes 0 and 1 do not reach each other"),
    (_set(0, "gpus"), "gpus is 0, expected a whole number"),
    (_set(1, "gpu", "speed"), "gpu.speed is not a field; remove it"),
    (_set([[0, 1]], "link", "pairs"), "link.pairs: GPUs 0 and 2 do not reach each other"),
    (_set([[0, 99]], "link", "pairs"), "link.pairs: GPUs 0 and 99 are not a pair of 8 GPUs"),
    (_set([[3, 3]], "link", "pairs"), "link.pairs: GPUs 3 and 3 are not a pair of 8 GPUs"),
    (_pairs([[0, 1]]), "link.pair_rates: expected a list of [GPU, peer, read, write, copy]"),
    (_pairs([[0, 1, 1e10, 0, 1e10]]), "link.pair_rates: expected a list of [GPU, peer, read"),
    (_pairs([[0, 8, 1e10, 1e10, 1e10]]), "GPU 0 and peer 8 are not a pair of 8 GPUs"),
    (_pairs([[0, 1, float("nan"), 1e10, 1e10]]), "link.pair_rates: expected a list of [GPU, peer"),
    (_pairs([[0.5, 1, 1e10, 1e10, 1e10]]), "link.pair_rates: expected a list of [GPU, peer, re"),
    (_pairs([[0, 1, *RATES], [0, 1, *RATES]]), "GPU 0 and peer 1 are there twice"),
    (_set("all", "link", "pairs"), "link.pairs: expected a list of [GPU, GPU]"),
    (_set([[0, 1, 2]], "link", "pairs"), "link.pairs: expected a list of [GPU"),
    (_set(None, "link", "pairs"), "link.pairs: expected a list of [G"),
    (_set(10**400, "link", "rate", "value"), "expected a number"),
    (_set(5, "gpu", "load_s", "date"), "gpu.load_s.date is 5, expected text"),
    (_set([[0, 1e15]], "gpu", "matmul_rate", "value"), "gpu.matmul_rate: expected growing sizes a"),
    (_set([[1e9, float("nan")]], "gpu", "matmul_rate", "value"), "matmul_rate: expected growing"),
    (_pairs([[0, 1, 9e12, 1e10, 1e10]]), "GPU 0 and peer 1 have 9e+12, more than link.rate"),
]


@pytest.mark.parametrize(("change", "message"), WRONG, ids=[each[1] for each in WRONG])
def test_a_wrong_description_is_refused_by_its_field(
    change: Callable[[dict], None], message: str
) -> None:
    data = copy.deepcopy(plain(read("h200x8")))
    change(data)
    with pytest.raises(ValueError, match=r"mine\.json: ") as caught:
        parse(data, "mine.json")
    assert message in str(caught.value)


def test_a_mesh_is_no_faster_than_its_wires() -> None:
    data = copy.deepcopy(plain(read("mi300x8")))
    data["link"]["pair_rate"]["value"] = 4e10
    with pytest.raises(ValueError, match=r"link\.rate is 3\.36e\+11, more than the 7 wires"):
        parse(data, "mine.json")


def test_ranks_that_share_a_gpu_are_on_one_node() -> None:
    data = copy.deepcopy(plain(read("h200-shared")))
    data |= {"nodes": 2, "network": plain(read("h200x8-2nodes"))["network"]}
    with pytest.raises(ValueError, match=r"nodes is 2 and link\.kind 'none', whose ranks share"):
        parse(data, "mine.json")


def test_measured_pairs_are_kept_and_found(tmp_path: Path) -> None:
    data = copy.deepcopy(plain(read("h200x8")))
    _pairs([[0, 1, 1e11, 2e11, 3e11], [1, 0, 1.5e11, 9e10, 3e11]])(data)
    link = parse(data, "mine.json").link
    path = tmp_path / "again.json"
    path.write_text(json.dumps(plain(parse(data, "mine.json"))))
    assert read(str(path)).link == link
    assert (link.rate_between(0, 1, True), link.rate_between(0, 1, False)) == (1e11, 2e11)
    assert link.rate_between(2, 3, True) == link.pair_rate, "nobody measured that one"
    assert link.slowest_pair == 9e10
    assert read("h200x8").link.slowest_pair == link.pair_rate


def test_an_unknown_machine_names_those_that_are() -> None:
    with pytest.raises(ValueError, match=r"machine 'h300' is not known; there are: h100x8, .*"):
        read("h300")


def test_a_file_that_is_not_json_is_named(tmp_path: Path) -> None:
    path = tmp_path / "broken.json"
    path.write_text("{")
    with pytest.raises(ValueError, match=r"broken\.json: not JSON"):
        read(str(path))


def test_a_figure_can_be_changed_by_its_name() -> None:
    half = read("h200x8").changed({"link.rate": 1.5e11, "gpu.num_sms": 131})
    assert (half.link.rate, half.gpu.num_sms) == (1.5e11, 131)
    with pytest.raises(ValueError, match=r"there is no figure 'link\.speed' to change"):
        half.changed({"link.speed": 1.0})


def test_a_description_of_an_earlier_version_is_read() -> None:
    """A machine calibrated by it lacks two figures, which count as 0."""
    data = plain(read("h200-shared"))
    for name in ("peer_s", "process_s"):
        del data["gpu"][name]
    made = parse(data, "earlier.json")
    assert (made.gpu.peer_s, made.gpu.process_s) == (0.0, 0.0)
    assert plain(made) == data
