"""Test the report of an RL run: its curves and its completions, without a network."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from dovetail.core.reporter import Reporter
from dovetail.train.report.completions import kept
from dovetail.train.report.metrics import RunMetrics
from dovetail.train.report.page import write
from dovetail.train.report.summary import read, summary

BINS = {"ratio__0.5": 0.0, "ratio_0.5_1.5": 0.9999, "ratio_1.5_": 0.0001}
ASKED = [{"role": "user", "content": "count the <b>geese</b> </script>"}]
CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "count", "arguments": '{"of": "geese"}'}}]}


def make(folder: Path, steps: int = 12) -> Path:
    with RunMetrics(folder, steps=steps, reporter=Reporter(show=False), report_to=()) as run:
        for step in range(1, steps + 1):
            noted = {"reward": step / steps, "reward_std": 0.2, "reward/right": 0.1, "reward/brief": 0.2, "kl": 0.01}
            noted |= {
                "entropy": 1.0,
                "completion_length": 5.0,
                "clip_fraction": 0.0,
                "gap": 1e-3,
                "gap_max": 1e-2,
            } | BINS
            noted |= {"rollout_seconds": 0.5, "reward_seconds": 0.1, "sync_seconds": 0.1, "draws": 1.0}
            run.record(step, {"loss": 0.0, "lr": 1e-6, "grad_norm": 0.5} | noted, 60.0 if step == 3 else 1.0, 100)
            if step % 4 == 0:
                run.evaluated(step, {"held_out_reward": 0.5, "held_out_pass@1": 0.25, "held_out_maj@4": 0.5})
    return folder


def answers(folder: Path, steps: int = 3, text: str = "three geese", tied: int = 0) -> Path:
    """Two groups of three in a step: texts in the first, conversations in the second, of which `tied` more have the
    lowest reward too."""
    lines = []
    for step in range(1, steps + 1):
        for group in (0, 1):
            for member in range(3 + tied * group):
                reward = None if (group, member) == (1, 2) else member / 2 if member < 3 else 0.0
                said = [*ASKED, CALL, {"role": "tool", "content": "3"}] if group else f"{text} {step} {member}"
                lines.append({
                    "step": step, "group": group, "member": member, "prompt": ASKED if group else "how many?",
                    "completion": said, "reward": reward, "rewards": {"right": reward, "brief": 0.5},
                    "problems": {} if reward is not None else {"right": "took longer than 5 s"}, "tokens": 4 + member,
                    "finish": "length" if member == 0 else "stop", "version": step - 1,
                })  # fmt: skip
    (folder / "completions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_the_report_has_the_curves_of_rewards(tmp_path):
    page = write(make(tmp_path / "run")).read_text()
    titles = re.findall(r'aria-label="([^"]*)"', page)
    assert titles[0].startswith("reward (band")
    for title in (
        "rewards", "held-out prompts answered correctly", "KL divergence", "entropy",
        "tokens per completion", "share of the tokens clipped", "|log-probability of trainer - of sampler|",
        "trainer&#x27;s / sampler&#x27;s probability, the last 12 steps", "step time, seconds", "loss",
        "draws per step",
    ):  # fmt: skip
        assert titles.count(title) == 1, title
    assert "ratio 0.5 1.5" not in titles and "rollout seconds" not in titles
    for bar in ("under 0.5", "0.5–1.5", "1.5 up", "99.99%", "0.01%"):
        assert f">{bar}<" in page
    assert "not drawn: 60 s" in page and "pass@1" in page and "maj@4" in page
    assert "completions-data" not in page


def test_the_report_has_the_figures_of_rewards(tmp_path):
    rows = dict(summary(read(make(tmp_path / "run"))))
    assert rows["reward"] == "1 (best 1 at 12; 0.08333 at first)" and rows["held-out pass@1"] == "25.0% (25.0% at 4)"
    assert rows["step time"] == "1 s (rollout 50%, reward 10%, sync 10%, train 30%)" and "step" not in rows


def test_the_page_of_a_long_run_is_sampled_and_says_so(tmp_path):
    folder = answers(make(tmp_path / "run"), steps=300, text="word " * 400)
    with (folder / "completions.jsonl").open("a") as file:
        file.write('{"step": 301, "gro')  # being written
    found = kept(folder / "completions.jsonl", most=60_000, of_step=5_000)
    assert found.all_steps == 300 and found.all_lines == 1800
    assert found.steps[0] == 1 and found.steps[-1] == 300 and 10 <= len(found.steps) <= 14
    assert len({b - a for a, b in zip(found.steps, found.steps[1:], strict=False)}) <= 2  # evenly
    assert all(len([one for one in found.lines if one["step"] == step]) == 3 for step in found.steps)  # a whole group
    everything = kept(folder / "completions.jsonl")
    assert len(everything.lines) == 1800
    assert "All 1,800 completions of 300 steps." in write(folder).read_text()


def test_samples_may_be_conversations(tmp_path):
    folder = make(tmp_path / "run")
    line = {"step": 4, "prompt": ASKED, "answer": [*ASKED, CALL], "reward": 0.5}
    (folder / "samples.jsonl").write_text(json.dumps(line) + "\n")
    page = write(folder).read_text()
    assert "<b>user</b> count the &lt;b&gt;geese&lt;/b&gt;" in page and "count({&quot;of&quot;" in page


# --- in a browser -----------------------------------------------------------------------------------------------------

# Uses the page as a user would, and writes what it shows into the document's title.
VISIT = """<script>
const field = name => document.querySelector(`#completions [name=${name}]`);
const set = (name, value) => { field(name).value = value; field(name).dispatchEvent(new Event('input')); };
const see = () => [...document.querySelectorAll('.wrote')].map(e => e.innerText);
const seen = {wide: document.documentElement.scrollWidth <= innerWidth, last: see()};
seen.marks = [...document.querySelectorAll('.wrote')].map(e => e.className);
seen.asked = [...document.querySelectorAll('.asked')].map(e => e.innerText);
document.querySelector('[data-go="-1"]').click(); seen.before = see();
set('group', '0'); seen.group = see();
set('sort', 'up'); seen.up = see();
set('which', 'cut'); seen.cut = see();
set('which', 'all'); set('group', ''); set('least', '0.5'); seen.least = see();
set('least', ''); set('which', 'none'); seen.none = see();
set('which', 'all'); set('words', 'GEESE 2 1'); seen.words = see();
document.title = JSON.stringify(seen);
</script></body>"""


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("chromium"), reason="needs chromium")
def test_completions_can_be_browsed(tmp_path):
    page = write(answers(make(tmp_path / "run"), tied=1))
    page.write_text(page.read_text().replace("</body>", VISIT))
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--dump-dom"]
    options += [f"--user-data-dir={tmp_path / 'profile'}", "--window-size=500,900"]
    made = subprocess.run(["chromium", *options, page.as_uri()], capture_output=True, text=True, timeout=120)
    title = re.search(r"<title>(.*?)</title>", made.stdout, re.DOTALL)
    assert title, made.stderr
    seen = json.loads(title[1].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))
    assert seen["wide"]  # nothing is wider than a narrow screen
    assert [text.split("\n")[-1] for text in seen["last"][:3]] == [f"three geese 3 {i}" for i in (2, 1, 0)]
    assert seen["marks"] == ["wrote best", "wrote ", "wrote worst", "wrote best", "wrote ", "wrote ", "wrote "]
    assert not any("worst of its prompt" in text for text in seen["last"][3:])  # two tie for it
    assert "count the <b>geese</b> </script>" in seen["asked"][1] and len(seen["asked"]) == 2
    assert "right: took longer than 5 s" in seen["last"][6] and 'count({"of": "geese"})' in seen["last"][6]
    assert "three geese 2 2" in seen["before"][0] and len(seen["before"]) == 7
    assert [text[-1] for text in seen["group"]] == ["2", "1", "0"]
    assert [text[-1] for text in seen["up"]] == ["0", "1", "2"]
    assert len(seen["cut"]) == 1 and "cut off at 4 tokens" in seen["cut"][0]
    assert len(seen["least"]) == 3 and len(seen["none"]) == 1 and "no reward" in seen["none"][0]
    assert len(seen["words"]) == 1 and seen["words"][0].endswith("three geese 2 1")
