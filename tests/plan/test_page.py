"""Test the pages of plans: self-contained, and interactive in a browser."""

import html as text
import json
import math
import re
import shutil
import subprocess
from dataclasses import dataclass, replace

import numpy as np
import pytest
from refusals import refuses
from typer.testing import CliRunner

from dovetail.cli.main import app
from dovetail.core.accelerator import Accelerator, parse
from dovetail.core.errors import MissingFileError
from dovetail.core.mesh import MESH_AXES, lay_out
from dovetail.core.training import Mesh, Training
from dovetail.models.registry import read_model
from dovetail.plan.operations import Operation
from dovetail.plan.page import NUMBER, SLICE, data, host_box, html, indices, unit, wasted, write
from dovetail.plan.serve_page import serving_page
from dovetail.plan.serve_plan import Workload, plan_serving
from dovetail.plan.train_page import training_page
from dovetail.plan.train_plan import plan_training


def trained(model: str, on: str, batch: int, mesh: Mesh = Mesh(), remat: str = "full"):
    settings = Training(model=model, batch=batch, length=4096, tokens=10**12, mesh=mesh, remat=remat)
    return training_page(plan_training(read_model(model), settings, parse(on)))


@pytest.fixture(scope="module")
def torus():
    return trained("llama3-8b", "v5p-128", 256, Mesh(tensor=4))


@pytest.fixture(scope="module")
def served():
    return serving_page("gemma3-4b", plan_serving(read_model("gemma3-4b"), parse("2 x v6e-8"), Workload(2048, 512, 64)))


# --- where chips are --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("on", "axes"),
    [
        ("v5p-128", {"fsdp": 16, "tensor": 4}),
        ("v5p-1024", {"data": 2, "fsdp": 32, "tensor": 8}),
        ("v5e-256", {"fsdp": 32, "context": 2, "tensor": 4}),
        ("tpu7x-4x4x4", {"fsdp": 32, "tensor": 4}),
        ("3 x v6e-16", {"data": 6, "fsdp": 4, "tensor": 2}),
        ("h100x64", {"data": 2, "fsdp": 8, "tensor": 4}),
    ],
)
def test_every_device_is_shown_where_the_mesh_has_it(on, axes):
    accelerator = parse(on)
    found = {axis["name"]: axis["digits"] for axis in indices(accelerator, axes)}
    laid = lay_out([axes.get(name, 1) for name in MESH_AXES], devices(accelerator))
    for place, device in np.ndenumerate(laid):
        assert place == tuple(index(found.get(name, []), device, len(accelerator.sides)) for name in MESH_AXES)


@dataclass(frozen=True)
class Device:
    """What jax's mesh_utils asks of a device."""

    id: int
    slice_index: int
    coords: tuple[int, ...]
    core_on_chip: int
    device_kind: str
    platform: str
    process_index: int = 0


def devices(accelerator: Accelerator) -> list[Device]:
    """In jax's order: along the first side first."""
    assert accelerator.chip
    kind, platform = accelerator.chip.kinds[0], "tpu" if accelerator.is_tpu else "gpu"
    made = []
    for number in range(accelerator.total_devices):
        chip, core = divmod(number, accelerator.chip.devices)
        which, local = divmod(chip, accelerator.chips)
        at = [local // math.prod(accelerator.sides[:i]) % side for i, side in enumerate(accelerator.sides)]
        made.append(Device(number, which, (*at, 0, 0)[:3], core, kind, platform))
    return made


def index(digits, device: Device, sides: int) -> int:
    """As the page reckons it."""
    places = dict(enumerate((*device.coords[:sides], device.core_on_chip)))
    where = {SLICE: device.slice_index, NUMBER: device.id} | places
    return sum(where[name] // stride % count * times for name, stride, count, times in digits)


def test_axes_with_the_most_traffic_are_nearest():
    """Devices that differ in tensor alone are neighbours on the torus."""
    fsdp, tensor = indices(parse("v5e-256"), {"fsdp": 64, "tensor": 4})
    assert tensor["over"] == "ICI" and [digit[1] for digit in tensor["digits"]] == [1]
    assert math.prod(digit[2] for digit in fsdp["digits"]) == 64


@pytest.mark.parametrize(
    ("on", "box"),
    [("v5p-128", (2, 2, 1)), ("v5e-256", (2, 2)), ("v6e-8", (2, 4)), ("v5p-8", (2, 2, 1)), ("h200x8", (8,))],
)
def test_the_chips_of_a_host(on, box):
    assert host_box(parse(on)) == box


# --- inside a chip ----------------------------------------------------------------------------------------------------


def product(m: int, k: int, n: int, copies: int = 1) -> Operation:
    return Operation("mlp.up", "forward", m, k, n, copies, 2.0 * m * k * n * copies, 1.0, 1.0, 1)


def test_padding():
    v5e, v6e = parse("v5e-16"), parse("v6e-16")
    assert (unit(v5e) or {})["side"] == 128 and (unit(v6e) or {})["side"] == 256 and unit(parse("cpu")) is None
    assert wasted(product(100, 4096, 14336), v5e) == 0.0  # rows stream through, as many as there are
    assert wasted(product(4096, 64, 1024), v5e) == 0.5 and wasted(product(4096, 64, 1024), v6e) == 0.75
    assert wasted(product(8, 128, 129), v5e) == pytest.approx(1 - 129 / 256)
    # 133 tiles on 132 multiprocessors take two rounds
    assert wasted(product(133 * 128, 64, 128), parse("h200x1")) == pytest.approx(1 - 133 / 264)


# --- the file ---------------------------------------------------------------------------------------------------------


def test_the_page_is_self_contained(torus, tmp_path):
    page = write(tmp_path / "plan.html", torus).read_text()
    assert [one.name for one in tmp_path.iterdir()] == ["plan.html"]
    assert "{{" not in page and "import " not in re.sub(r"<script type.*?</script>", "", page, flags=re.DOTALL)
    assert set(re.findall(r"https?://[^\s\"'<]*", page)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"<(script|img|link|iframe)[^>]*(src|href)=", page) and "fetch(" not in page
    assert len(page) < 400_000
    with refuses(None, MissingFileError, naming=str(tmp_path / "nowhere")):
        write(tmp_path / "nowhere" / "plan.html", torus)


def test_names_are_escaped(torus):
    page = html(replace(torus, title="</script><script>alert(1)</script>"))
    assert "<script>alert" not in page and "&lt;script&gt;alert" in page


def test_the_data_of_a_page(torus, served):
    found = data(torus)
    assert found["machine"]["sides"] == (4, 4, 4) and found["machine"]["wraps"] == (True, True, True)
    best = found["plans"][0]
    assert [axis["name"] for axis in best["axes"]] == ["fsdp", "tensor"] and best["limit"] == int(0.92 * 95 * 2**30)
    assert {name for name, _, _ in best["figures"]} >= {"step", "rate", "MFU", "run"}
    assert data(served)["step"] == "decode step" and data(served)["curves"][0]["points"]
    memory = dict(data(served)["plans"][0]["memory"])
    assert sum(memory.values()) == pytest.approx(data(served)["plans"][0]["limit"], rel=1e-3)


@pytest.mark.slow
def test_a_page_shows_the_command_of_a_plan_and_what_is_not_served():
    cfg, work = read_model("llama3-70b"), Workload(1024, 256, 8)
    over = serving_page("llama3-70b", plan_serving(cfg, parse("v5e-16"), work), lambda plan: "no command starts it")
    assert "Not served by Dovetail: a replica spans 4 machines" in over.about
    assert [one.recipe for one in over.choices] == ["no command starts it\n"] * len(over.choices)
    here = serving_page("a model", plan_serving(cfg, parse("v6e-8"), work))
    assert "Not served" not in here.about and here.choices[0].recipe.startswith("dovetail serve 'a model' --tensor")


# --- in a browser -----------------------------------------------------------------------------------------------------

FAULTS = "<script>const faults = []; addEventListener('error', event => faults.push(event.message));</script></head>"
# Uses the page as a person would, and tells the page around it what was seen.
VISIT = """<script>
const see = id => document.getElementById(id), told = () => see('mesh-told').innerText;
const pixels = id => {
  const c = see(id), d = new Uint32Array(c.getContext('2d').getImageData(0, 0, c.width, c.height).data.buffer);
  const tones = new Set(d);
  return [d.reduce((sum, v) => (sum * 31 + v) % 1e9, 0), tones.size];
};
const set = (id, value) => { see(id).value = value; see(id).dispatchEvent(new Event('input')); };
const press = key => see('mesh').dispatchEvent(new KeyboardEvent('keydown', {key, bubbles: true}));
const tap = (id, x, y) => {
  const box = see(id).getBoundingClientRect(), at = {clientX: box.left + x, clientY: box.top + y, pointerId: -1};
  for (const kind of ['pointerdown', 'pointerup']) see(id).dispatchEvent(new PointerEvent(kind, at));
};
const drawn = () => { drawMesh(); return pixels('mesh')[0]; };
const seen = {narrow: document.documentElement.scrollWidth <= innerWidth, width: innerWidth};
seen.tones = Object.fromEntries(['mesh', 'timeline', 'array-left', 'array-right'].map(id => [id, pixels(id)[1]]));
seen.bars = document.querySelectorAll('#memory .track').length;
seen.dots = document.querySelectorAll('#roofline .dot').length;
document.querySelector('#roofline .dot').dispatchEvent(new MouseEvent('click'));
seen.dot = see('roofline-told').textContent;
seen.axes = [...see('mesh-axis').options].map(axis => { set('mesh-axis', axis.value); return drawn(); });
const box = see('mesh').getBoundingClientRect();
for (let far = 0; far < 150 && !/^chip/.test(told()); far += 5)  // from the middle outwards, until a chip is met
  for (const [x, y] of [[far, 0], [-far, 0], [0, far], [far, far]])
    if (!/^chip/.test(told())) tap('mesh', box.width / 2 + x, box.height / 2 + y);
seen.chip = told();
seen.number = see('mesh-chip').value;
seen.bright = drawn() !== seen.axes.at(-1);
press('ArrowRight');
seen.next = see('mesh-chip').value;
press('Escape');
seen.none = see('mesh-chip').value;
see('mesh-turn').querySelector('button').click();
seen.turned = drawn() !== seen.axes.at(-1);
seen.bounds = [plan().time.lower, timeline.made.seconds, plan().time.upper];
const whole = pixels('timeline')[0];
set('timeline-mode', 'serial');
seen.serial = timeline.made.seconds;
seen.lane = pixels('timeline')[0] !== whole;
seen.clocks = [[see('array-told').textContent, pixels('array-left')[0]]];
for (const id of ['array-step', 'array-leap']) {
  see(id).click();
  seen.clocks.push([see('array-told').textContent, pixels('array-left')[0]]);
}
see('array-play').click();
seen.play = see('array-play').textContent;
see('array-play').click();
see('plans').querySelectorAll('button').forEach(one => one.click());
seen.faults = faults;
parent.postMessage(seen, '*');
</script></body>"""
AROUND = """<!doctype html><title></title><body style="margin:0"><script>
const all = {};
addEventListener('message', event => {
  const frames = [...document.querySelectorAll('iframe')];
  all[frames.findIndex(one => one.contentWindow === event.source)] = event.data;
  document.title = JSON.stringify(all);
});
</script>FRAMES"""


@pytest.fixture(scope="module")
def seen(torus, served, tmp_path_factory):
    """What a visitor with a narrow screen sees of four pages, all in one browser: starting it takes longest."""
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("needs chromium")
    folder = tmp_path_factory.mktemp("pages")
    pages = {
        "torus": torus, "served": served, "gpus": trained("qwen3-30b-a3b", "h200x16", 64, Mesh(expert=0)),
        "pod": trained("llama3-8b", "v5p-17920", 8960, Mesh(tensor=8)),
    }  # fmt: skip
    for name, page in pages.items():
        made = html(page).replace("</head>", FAULTS, 1).replace("</body>", VISIT)
        (folder / f"{name}.html").write_text(made)
    frames = "".join(f'<iframe src="{name}.html" width="360" height="700" style="border:0"></iframe>' for name in pages)
    (folder / "all.html").write_text(AROUND.replace("FRAMES", frames))
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--dump-dom"]
    options += [f"--user-data-dir={folder / 'profile'}", "--window-size=1500,760", "--virtual-time-budget=4000"]
    command = [chromium, *options, (folder / "all.html").as_uri()]
    made = subprocess.run(command, capture_output=True, text=True, timeout=180)
    title = re.search(r"<title>(.*?)</title>", made.stdout, re.DOTALL)
    assert title and title[1], made.stderr
    found = json.loads(text.unescape(title[1]))
    return {name: found[str(i)] for i, name in enumerate(pages) if str(i) in found}


@pytest.mark.parametrize("name", ["torus", "served", "gpus", "pod"])
def test_a_browser_draws_the_pictures_and_reacts(seen, name):
    one = seen[name]
    assert one["faults"] == [] and one["narrow"] and one["width"] <= 360
    assert min(one["tones"].values()) >= 4, one["tones"]
    assert one["bars"] >= 1 and one["dots"] >= 5 and "FLOPs per byte: bound by" in one["dot"]
    assert len(set(one["axes"])) == len(one["axes"])  # each axis colours the chips in its own way
    assert one["number"] != "" and f"chip {int(one['number']):,}" in one["chip"] and "place in the mesh" in one["chip"]
    assert one["bright"] and one["next"] != one["number"] and one["none"] == ""
    says, shows = zip(*one["clocks"], strict=True)
    assert len(set(says)) == len(set(shows)) == 3 and one["play"] == "pause"


@pytest.mark.parametrize("name", ["torus", "served", "pod"])
def test_a_torus_turns(seen, name):
    assert seen[name]["turned"] and "coordinates" in seen[name]["chip"]


@pytest.mark.parametrize("name", ["torus", "served", "gpus", "pod"])
def test_the_timeline_keeps_to_the_bounds(seen, name):
    lower, drawn, upper = seen[name]["bounds"]
    assert lower * 0.999 <= drawn <= seen[name]["serial"] * 1.001 <= upper * 1.002
    assert seen[name]["lane"] or drawn == pytest.approx(seen[name]["serial"])


# --- from the command line --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [("train", "tiny", "--batch", "64k", "--seq", "256"), ("serve", "smollm2-135m", "--in", "64", "--out", "64")],
)
def test_the_command_writes_it(words, tmp_path):
    path = tmp_path / "plan.html"
    made = CliRunner().invoke(app, ["plan", *words, "--on", "v5e-4", "--json", "--html", str(path)])
    assert made.exit_code == 0, made.output
    assert json.loads(made.stdout) and f"plots: {path}" in made.stderr
    assert f"<title>{words[1]} on v5litepod-4</title>" in path.read_text()
