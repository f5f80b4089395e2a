import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ttvd.geometry import assign
from ttvd.nn.anchors import Anchors
from ttvd.nn.descriptors import InputMoments
from ttvd.nn.fingerprint import fingerprint
from ttvd.nn.split import split
from ttvd.zoo.catalog import Source
from ttvd.zoo.sites import Sites, temperature_key
from ttvd.zoo.tensorfile import CHECKSUM, FORMAT, KIND, write_tensors


def make_sites(k: int = 3, v: int = 4, d: int = 5, model: nn.Module | None = None) -> Sites:
    means = torch.randn(k, v, d, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    name = "0" * 16 if model is None else fingerprint(model)
    return Sites(means, torch.full((k, v), 7), name, 0.1, {"civd@-0.8": 0.05, "vd": 1.5})


def make_model(outputs: int = 12, dim: int = 5) -> nn.Module:
    return split(nn.Sequential(nn.Flatten(), nn.Linear(4, dim), nn.ReLU(), nn.Linear(dim, outputs)))


def test_round_trip(tmp_path: Path) -> None:
    sites = make_sites()
    sites.save(tmp_path / "a.safetensors")
    loaded = Sites.load(tmp_path / "a.safetensors")
    assert torch.equal(loaded.means, sites.means)
    assert torch.equal(loaded.counts, sites.counts)
    assert (loaded.fingerprint, loaded.fraction) == (sites.fingerprint, sites.fraction)
    assert dict(loaded.temperatures) == dict(sites.temperatures)
    assert loaded.anchors == {}
    assert [path.name for path in tmp_path.iterdir()] == ["a.safetensors"]


def test_round_trip_of_anchors(tmp_path: Path) -> None:
    path, drawn = tmp_path / "a.safetensors", torch.rand(2, 2, 6, dtype=torch.float64)
    norms = (("layer1.0.bn", 2), ("bn", 4))
    kinds = {views: Anchors(mean, var, norms) for views, (mean, var) in zip((1, 4), drawn, strict=True)}
    for anchors in ({4: kinds[4]}, {4: kinds[4], 1: kinds[1]}, kinds):
        sites = replace(make_sites(), anchors=anchors).with_temperatures({"pd": 2.0})
        sites.save(path)
        loaded = Sites.load(path)
        assert set(loaded.anchors) == set(anchors)
        for views, found in loaded.anchors.items():
            assert torch.equal(found.means, anchors[views].means)
            assert torch.equal(found.variances, anchors[views].variances)
            assert found.norms == norms
        assert torch.equal(loaded.means, sites.means)
    names = {f"norm_{kind}.{views}" for kind in ("means", "variances") for views in (1, 4)}
    assert set(load_file(path)) == {"means", "counts"} | names

    with pytest.raises(ValueError, match="of 1 or of all 4 views, not of 12"):
        replace(make_sites(), anchors={1: kinds[1], 12: kinds[4]})


ONE = torch.ones(2).double()
NORMS = (("0", 1), ("2", 1))
GOOD = {"fingerprint": "x", "fraction": "1.0", "temperatures": "{}", "rotation_loss": "null"}
GOOD |= {f"norms.{views}": json.dumps(NORMS) for views in (1, 4)}


@pytest.mark.parametrize(
    ("means", "variances", "reason"),
    [
        (ONE.float(), ONE, r"means of anchors must be float64 \(c,\), got torch.float32"),
        (ONE, ONE.float(), r"variances of anchors must be float64 \(c,\), got torch.float32"),
        (ONE[None], ONE[None], r"means .* got torch.float64 \(1, 2\)"),
        (ONE, ONE[:1], r"variances .* got torch.float64 \(1,\)"),
        (ONE * torch.nan, ONE, "means of anchors must be finite"),
        (ONE, ONE * torch.inf, "variances of anchors must be finite"),
        (ONE, -1e-9 * ONE, "variances of anchors must not be negative"),
    ],
)
def test_nonsense_is_no_anchor(tmp_path: Path, means: Tensor, variances: Tensor, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Anchors(means, variances, NORMS)
    path, sites = tmp_path / "a.safetensors", make_sites()
    tensors = {"means": sites.means, "counts": sites.counts}
    tensors |= {"norm_means.1": ONE.clone(), "norm_variances.1": ONE.clone()}
    tensors |= {"norm_means.4": means.clone(), "norm_variances.4": variances.clone()}
    write_marked(path, tensors, GOOD)
    with pytest.raises(ValueError, match=f"not a valid ttvd.sites file: {reason}"):
        Sites.load(path)


@pytest.mark.parametrize("norms", [(), (("0", 1),), (("0", 1), ("2", 2)), (("0", 3),)])
def test_anchors_belong_to_norms_with_as_many_channels(norms: tuple[tuple[str, int], ...]) -> None:
    with pytest.raises(ValueError, match="the norms of anchors do not have 2 channels together"):
        Anchors(ONE, ONE, norms)


@pytest.mark.parametrize("lacking", ["norms.1", "norms.4"])
def test_anchors_of_norms_without_names_are_refused(tmp_path: Path, lacking: str) -> None:
    path, kinds = tmp_path / "a", {views: Anchors(views * ONE, views + ONE, NORMS) for views in (1, 4)}
    replace(make_sites(), anchors=kinds).save(path)
    tensors, metadata = read_raw(path)
    assert json.loads(metadata.pop(lacking)) == [["0", 1], ["2", 1]]
    write_marked(path, tensors, metadata)
    with pytest.raises(ValueError, match=f"not a valid ttvd.sites file: .*{lacking}"):
        Sites.load(path)
    for norms in ("", "{", "2", "null", '["0", "2"]', '[["0", 1]]', '[["0", "one"], ["2", 1]]', '{"0": 2}'):
        write_marked(path, tensors, {**metadata, lacking: norms})
        with pytest.raises(ValueError, match=r"not a valid ttvd.sites file"):
            Sites.load(path)
    bare = {name: value for name, value in tensors.items() if not name.startswith("norm_")}
    write_marked(path, bare, {key: text for key, text in metadata.items() if not key.startswith("norms.")})
    assert Sites.load(path).anchors == {}


def test_load_refuses_damaged_and_foreign_files(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    with pytest.raises(FileNotFoundError, match=r"no ttvd.sites file"):
        Sites.load(path)
    make_sites().save(path)
    whole = path.read_bytes()
    for length in (0, 5, 100, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match="truncated"):
            Sites.load(path)
    path.write_bytes(b"not a tensor in sight, just text")
    with pytest.raises(ValueError, match="not a safetensors file"):
        Sites.load(path)
    save_file({"means": torch.zeros(1)}, path)
    with pytest.raises(ValueError, match=r"not a ttvd.sites file: its kind is 'not given'"):
        Sites.load(path)


def read_raw(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a file, and its metadata without the checksum."""
    with safe_open(path, framework="pt") as file:
        return load_file(path), {key: text for key, text in file.metadata().items() if key != CHECKSUM}


def write_marked(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str], version: int = 2) -> None:
    write_tensors(path, tensors, kind="ttvd.sites", version=version, metadata=metadata)


def test_load_refuses_newer_and_incomplete_files(tmp_path: Path) -> None:
    path, sites = tmp_path / "a.safetensors", make_sites()
    tensors = {"means": sites.means, "counts": sites.counts}
    good = dict(GOOD)
    write_marked(path, tensors, good)
    assert Sites.load(path).fingerprint == "x"
    write_marked(path, tensors, good, version=3)
    with pytest.raises(ValueError, match=r"format 3 .* upgrade"):
        Sites.load(path)
    write_marked(path, tensors, good, version=1)
    with pytest.raises(ValueError, match=r"format 1 .*estimate_sites"):
        Sites.load(path)
    save_file(tensors, path, {KIND: "ttvd.sites", FORMAT: "new", **good})
    with pytest.raises(ValueError, match="format number is 'new'"):
        Sites.load(path)
    save_file(tensors, path, {KIND: "ttvd.sites", "ttvd.version": "1", **good})
    with pytest.raises(ValueError, match=r"no format number.*0\.1\.0.*estimate_sites"):
        Sites.load(path)
    write_marked(path, {"means": sites.means}, good)
    with pytest.raises(ValueError, match=r"not a valid ttvd.sites file: 'counts'"):
        Sites.load(path)
    pair = {"norm_means.1": ONE.clone(), "norm_variances.1": ONE.clone()}
    for there, lacking in (("variances.4", "means.4"), ("means.4", "variances.4")):
        write_marked(path, {**tensors, **pair, f"norm_{there}": ONE}, good)
        with pytest.raises(ValueError, match=f"not a valid ttvd.sites file: 'norm_{lacking}'"):
            Sites.load(path)
    for end in ("", ".", ".all", ".4.0"):
        write_marked(path, {**tensors, f"norm_means{end}": ONE, f"norm_variances{end}": ONE.clone()}, good)
        with pytest.raises(ValueError, match=r"not a valid ttvd.sites file"):
            Sites.load(path)
    for bad in ({"temperatures": "[1]"}, {"temperatures": "{"}, {"fraction": "all"}, {"fraction": "2"}):
        write_marked(path, tensors, {**good, **bad})
        with pytest.raises(ValueError, match=r"not a valid ttvd.sites file"):
            Sites.load(path)


@pytest.mark.parametrize("loss", [None, 0.0, 0.1 + 0.2, 1e-300, 5])
def test_round_trip_of_the_rotation_loss(tmp_path: Path, loss: float | None) -> None:
    """To the last bit."""
    path, sites = tmp_path / "a.safetensors", replace(make_sites(), rotation_loss=loss)
    sites.with_temperatures({"pd": 2.0}).save(path)
    assert Sites.load(path).rotation_loss == loss
    assert make_sites().rotation_loss is None


@pytest.mark.parametrize(
    "text", ["-0.1", "NaN", "Infinity", "1e999", "", "{", "[0.1]", "{}", '"much"', "none"]
)
def test_nonsense_is_no_rotation_loss(tmp_path: Path, text: str) -> None:
    path, sites = tmp_path / "a.safetensors", make_sites()
    if text in ("-0.1", "NaN", "Infinity"):
        with pytest.raises(
            ValueError, match=r"rotation_loss must be a number, finite and at least 0, got (-0.1|nan|inf)$"
        ):
            replace(sites, rotation_loss=float(text))
    write_marked(path, {"means": sites.means, "counts": sites.counts}, {**GOOD, "rotation_loss": text})
    with pytest.raises(ValueError, match=r"a.safetensors is not a valid ttvd.sites file: "):
        Sites.load(path)


@pytest.mark.parametrize("name", ["mirror_gain", "accuracy"])
def test_round_trip_of_what_files_may_lack(tmp_path: Path, name: str) -> None:
    path = tmp_path / "a.safetensors"
    for value in (None, 0.1 + 0.2, 0, 1.0):
        changed: dict[str, Any] = {name: value}
        replace(make_sites(), **changed).save(path)
        assert getattr(Sites.load(path), name) == value
    tensors = {"means": make_sites().means, "counts": make_sites().counts}
    write_marked(path, tensors, GOOD)  # a file of an older version
    assert getattr(Sites.load(path), name) is None
    for text in ("-1.1", "1.1", "NaN", "Infinity", "", "{", "[0.1]", '"much"'):
        write_marked(path, tensors, {**GOOD, name: text})
        with pytest.raises(ValueError, match=r"a.safetensors is not a valid ttvd.sites file: "):
            Sites.load(path)
    changed = {name: math.nan}
    with pytest.raises(ValueError, match=f"{name} must be a number from -?[01] to 1, got nan"):
        replace(make_sites(), **changed)


@pytest.mark.parametrize("known", [True, False])
def test_round_trip_of_descriptors(tmp_path: Path, known: bool) -> None:
    path, values = tmp_path / "a.safetensors", torch.rand(5, 4, dtype=torch.float64) + 0.1
    with pytest.raises(ValueError, match="describe 5 classes, the sites are of 3"):
        replace(make_sites(), inputs=InputMoments(values[0], values[1], values[2], values))
    inputs = InputMoments(values[0], values[1], values[2], values[2:] if known else None)
    replace(make_sites(), inputs=inputs).save(path)
    found = Sites.load(path).inputs
    assert found is not None
    for one, other in zip(vars(found).values(), vars(inputs).values(), strict=True):
        assert (one is None and other is None) or torch.equal(one, other)


def test_a_changed_number_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    make_sites().save(path)
    whole = path.read_bytes()
    for place in (-1, -100, whole.index(b"0.05")):  # a mean, a count, a temperature
        changed = bytearray(whole)
        changed[place] ^= 1
        path.write_bytes(changed)
        with pytest.raises(ValueError, match=r"checksum.*estimate_sites"):
            Sites.load(path)
    path.write_bytes(whole)
    tensors, metadata = read_raw(path)
    save_file(tensors, path, metadata)
    with pytest.raises(ValueError, match="checksum"):
        Sites.load(path)


def test_repr_is_one_short_line() -> None:
    norms = Anchors(torch.ones(500).double(), torch.ones(500).double(), (("0", 500),))
    sites = replace(make_sites(k=500, d=300), anchors={4: norms})
    assert repr(sites) == (
        "Sites(classes=500, views=4, dim=300, fraction=0.1, temperatures=[civd@-0.8, vd], anchors=[4], "
        "rotation_loss=None)"
    )
    assert repr(norms) == "Anchors(norms=1, channels=500)"
    assert len(repr(Source(nn.Linear(2, 2), sites))) < 200


def test_metadata_is_readable_json(tmp_path: Path) -> None:
    make_sites().save(tmp_path / "a.safetensors")
    raw = (tmp_path / "a.safetensors").read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    assert json.loads(header["__metadata__"]["temperatures"]) == {"civd@-0.8": 0.05, "vd": 1.5}


def test_construction_refuses_nonsense() -> None:
    good = make_sites()
    means, counts = good.means, good.counts
    cases: list[tuple[Tensor, Tensor, float, dict[str, float], str]] = [
        (means.float(), counts, 1.0, {}, "float64"),
        (means[0], counts, 1.0, {}, r"\(k, v, d\)"),
        (means, counts[:, :1], 1.0, {}, r"counts must be int64 \(3, 4\)"),
        (means, counts.double(), 1.0, {}, "counts must be int64"),
        (means * float("nan"), counts, 1.0, {}, "finite"),
        (means, counts * 0, 1.0, {}, "class without samples"),
        (means, counts, 0.0, {}, "fraction"),
        (means, counts, 1.0, {"vd": 0.0}, "temperatures must be positive"),
    ]
    for m, c, fraction, temperatures, reason in cases:
        with pytest.raises(ValueError, match=reason):
            Sites(m, c, "x", fraction, temperatures)


def test_temperatures_by_structure_and_gamma() -> None:
    sites = make_sites()
    assert sites.temperature("civd", -0.8) == 0.05
    assert sites.temperature("vd") == sites.temperature("vd", 3.0) == 1.5
    with pytest.raises(ValueError, match=r"no temperature 'cipd@0.5' .*calibrate.*'cipd',.*gammas=\(0.5,\)"):
        sites.temperature("cipd", 0.5)
    with pytest.raises(ValueError, match=r"probabilities.*sites = ttvd\.calibrate\(model, sites, held_out\)"):
        replace(sites, temperatures={}).temperature("cipd", 1.0)
    with pytest.raises(ValueError, match=r"no temperature 'pd' \(they hold: civd@-0.8, vd\)"):
        sites.temperature("pd")
    with pytest.raises(ValueError, match="structure must be one of vd, civd, pd, cipd, got 'svm'"):
        sites.temperature("svm")
    with pytest.raises(ValueError, match="give gamma"):
        temperature_key("civd")
    more = sites.with_temperatures({"pd": 2.0})
    assert more.temperature("pd") == 2.0
    assert more.temperature("vd") == 1.5
    assert "pd" not in sites.temperatures


def test_diagram_selects_views_by_angle() -> None:
    sites = make_sites()
    for views in (1, 2, 4):
        diagram = sites.diagram(views)
        assert diagram.sites.dtype == torch.float32
        chosen = sites.means[:, :: 4 // views].reshape(-1, sites.dim).float()
        assert torch.equal(diagram.sites, chosen)
        assert diagram.num_classes == 3
    assert sites.diagram().num_sites == 12
    assert assign(sites.means[:, 0].float(), sites.diagram(1)).tolist() == [0, 1, 2]
    for views in (0, 3, 8):
        with pytest.raises(ValueError, match="must divide the 4 views"):
            sites.diagram(views)


def test_check_accepts_the_model_and_says_why_it_refuses_others() -> None:
    model = make_model()
    make_sites(model=model).check(model)
    with pytest.raises(ValueError, match="5 dimensions, the model's features 6"):
        make_sites(model=model).check(make_model(dim=6))
    with pytest.raises(ValueError, match="3 classes and 4 views, the model's head has 10 outputs"):
        make_sites(model=model).check(make_model(outputs=10))
    with pytest.raises(ValueError, match="its weights differ; estimate the sites again"):
        make_sites(model=model).check(make_model())
    plain = make_model(outputs=3)
    make_sites(model=plain).check(plain)


def test_fingerprint_sees_weights_and_nothing_else() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))
    first = fingerprint(model)
    assert len(first) == 16
    assert int(first, 16) >= 0
    assert fingerprint(model.eval()) == first
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    assert fingerprint(model) == first
    assert fingerprint(nn.ModuleDict({"module": model})) == first
    assert fingerprint(model.to(torch.bfloat16).float()) != first


@pytest.mark.parametrize("change", ["value", "name", "shape", "dtype", "buffer"])
def test_fingerprint_changes_with(change: str) -> None:
    model = nn.Module()
    model.register_buffer("a", torch.zeros(4))
    model.register_buffer("b", torch.ones(()))
    first = fingerprint(model)
    other = nn.Module()
    a = {"value": torch.tensor([0.0, 0, 0, 1]), "shape": torch.zeros(2, 2), "dtype": torch.zeros(4).int()}
    other.register_buffer("a" if change != "name" else "c", a.get(change, torch.zeros(4)))
    other.register_buffer("b", torch.zeros(()) if change == "buffer" else torch.ones(()))
    assert fingerprint(other) != first


def test_fingerprint_of_odd_states() -> None:
    empty = nn.Module()
    empty.register_buffer("none", torch.zeros(0, 3))
    assert fingerprint(empty) != fingerprint(nn.Module())
    half = nn.Linear(2, 2, dtype=torch.bfloat16)
    assert fingerprint(half) == fingerprint(half)
