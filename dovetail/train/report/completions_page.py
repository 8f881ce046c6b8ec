"""The part of a report's page in which what a policy wrote is browsed: by step, by reward, by group."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from dovetail.train.report.completions import FILE, Kept, kept, shortened, turns, written
from dovetail.train.report.summary import RunRecord

STYLE = """
.pick{display:flex;flex-wrap:wrap;gap:8px 12px;align-items:end;margin-bottom:10px}
.pick label{display:flex;flex-direction:column;font-size:12px;color:var(--dim);flex:1 1 108px;min-width:0}
.pick .steps{flex:2 1 200px}.pick .steps span{display:flex;gap:6px}.pick .steps input{flex:1;min-width:60px}
.pick select,.pick input,.pick button,button.more{font:14px system-ui,sans-serif;color:var(--ink);
background:var(--card);border:1px solid var(--rule);border-radius:6px;padding:6px 8px;min-width:0;max-width:100%}
.pick button,button.more{cursor:pointer}.pick button:disabled{opacity:.4;cursor:default}
.pick input[type=range]{padding:0;accent-color:var(--c0)}
@media(max-width:640px){.pick label{flex-basis:140px}.pick .steps{flex-basis:100%}}
p.told{margin:0 0 10px;color:var(--dim);font-size:13px}
.asked{margin:18px 0 8px;padding-left:10px;border-left:3px solid var(--rule);color:var(--dim);font-size:14px}
.wrote{background:var(--card);border-radius:8px;border-left:4px solid var(--rule);padding:10px 12px;margin-bottom:8px}
.wrote.best{border-left-color:var(--c2)}.wrote.worst{border-left-color:var(--bad)}
.wrote header{display:flex;flex-wrap:wrap;gap:2px 12px;align-items:baseline;color:var(--dim);font-size:12px;
margin-bottom:4px}
.wrote header b{font-size:16px;color:var(--ink);font-variant-numeric:tabular-nums}
.wrote .tag{font-weight:600}.best .tag{color:var(--c2)}.worst .tag{color:var(--bad)}.wrote .why{color:var(--bad)}
.said{white-space:pre-wrap;overflow-wrap:anywhere}
.wrote .said{font:13px/1.5 ui-monospace,monospace}
.turn{margin-top:6px}.turn>i{font:600 12px system-ui,sans-serif;color:var(--c3)}
.turn.user>i{color:var(--c0)}.turn.tool>i{color:var(--c1)}.turn.system>i{color:var(--dim)}
"""

_CONTROLS = """
<div class="pick">
<label class="steps">step <span><button type="button" data-go="-1" aria-label="the step before">&lsaquo;</button>
<input type="range" name="at" min="0" value="0" aria-label="step">
<button type="button" data-go="1" aria-label="the next step">&rsaquo;</button></span></label>
<label>prompt <select name="group"></select></label>
<label>sort <select name="sort"><option value="group">by prompt, best first</option>
<option value="down">best reward first</option><option value="up">worst reward first</option>
<option value="long">longest first</option><option value="short">shortest first</option></select></label>
<label>show <select name="which"><option value="all">all</option>
<option value="best">best of each prompt</option><option value="worst">worst of each prompt</option>
<option value="cut">cut off by their length</option><option value="none">without a reward</option></select></label>
<label>reward from <input name="least" type="number" step="any" placeholder="any"></label>
<label>to <input name="most" type="number" step="any" placeholder="any"></label>
<label>with the words <input name="words" type="search" placeholder="any"></label>
</div>
<p class="told" data-count></p><div data-list></div>
<button type="button" class="more" hidden>show more</button>
"""

# A row is [step, group, member, prompt, completion, reward, rewards, problems, tokens, finish, version]; prompts, and
# the names of rewards, are told once. A text is a string, or [[role, text], ...].
_SCRIPT = """
(() => {
  const page = document.getElementById('completions'), PART = 30;
  const {steps, prompts, names, rows} = JSON.parse(document.getElementById('completions-data').textContent);
  const field = name => page.querySelector(`[name=${name}]`), list = page.querySelector('[data-list]');
  const more = page.querySelector('.more');
  const make = (tag, kind, text) => {
    const made = document.createElement(tag);
    if (kind) made.className = kind;
    if (text !== undefined) made.textContent = text;
    return made;
  };
  const figure = x => x === null ? 'none' : String(+x.toPrecision(4));
  const plain = said => typeof said === 'string' ? said : said.map(turn => turn.join(': ')).join('\\n');
  const text = said => {
    if (typeof said === 'string') return make('div', 'said', said);
    const all = make('div');
    for (const [role, words] of said) {
      const turn = make('div', 'turn ' + (/^[a-z]+$/.test(role) ? role : ''));
      turn.append(make('i', '', role), make('div', 'said', words));
      all.append(turn);
    }
    return all;
  };
  let found = [], shown = 0, groups = new Map();

  const rank = row => {  // by reward; answers that share the highest or lowest reward are all shown by the filter
    const {low, high} = groups.get(row[1]);
    return row[5] === null || low === high ? '' : row[5] === high ? 'best' : row[5] === low ? 'worst' : '';
  };
  const label = row => {  // of one answer alone: a tie is neither the best nor the worst
    const of = rank(row), same = groups.get(row[1]).count.get(row[5]);
    return same === 1 ? of : '';
  };
  const card = row => {
    const [, group, member, , said, reward, rewards, problems, tokens, finish, version] = row;
    const made = make('article', 'wrote ' + label(row)), head = make('header');
    head.append(make('b', '', reward === null ? 'no reward' : figure(reward)));
    if (label(row)) head.append(make('span', 'tag', label(row) + ' of its prompt'));
    if (names.length > 1) names.forEach((name, i) => {
      if (rewards[i] !== undefined) head.append(make('span', '', name + ' ' + figure(rewards[i])));
    });
    head.append(make('span', '', finish === 'length' ? `cut off at ${tokens} tokens` : `${tokens} tokens, ${finish}`));
    head.append(make('span', '', `prompt ${group + 1}, answer ${member + 1}, weights of update ${version}`));
    for (const [name, why] of Object.entries(problems || {})) head.append(make('span', 'why', name + ': ' + why));
    made.append(head, text(said));
    return made;
  };
  const grow = () => {
    for (const row of found.slice(shown, shown + PART)) {
      if (!shown || found[shown - 1][3] !== row[3]) {
        const asked = make('div', 'asked');
        asked.append(text(prompts[row[3]]));
        list.append(asked);
      }
      list.append(card(row));
      shown++;
    }
    more.hidden = shown >= found.length;
    more.textContent = `show more (${found.length - shown} are left)`;
  };
  const order = {
    group: (a, b) => a[1] - b[1] || (b[5] ?? -Infinity) - (a[5] ?? -Infinity),
    down: (a, b) => (b[5] ?? -Infinity) - (a[5] ?? -Infinity), up: (a, b) => (a[5] ?? Infinity) - (b[5] ?? Infinity),
    long: (a, b) => b[8] - a[8], short: (a, b) => a[8] - b[8],
  };
  const fits = row => {
    const which = field('which').value, words = field('words').value.trim().toLowerCase();
    const least = field('least').value, most = field('most').value;
    return (field('group').value === '' || row[1] === +field('group').value)
      && (which === 'all' || which === rank(row) || (which === 'cut' && row[9] === 'length')
          || (which === 'none' && row[5] === null))
      && (least === '' || (row[5] ?? -Infinity) >= +least) && (most === '' || (row[5] ?? Infinity) <= +most)
      && (!words || (plain(row[4]) + plain(prompts[row[3]])).toLowerCase().includes(words));
  };
  const show = () => {
    const step = steps[+field('at').value], here = rows.filter(row => row[0] === step);
    found = here.filter(fits).sort(order[field('sort').value]);
    const judged = here.map(row => row[5]).filter(reward => reward !== null);
    const mean = judged.length ? figure(judged.reduce((a, b) => a + b, 0) / judged.length) : 'none';
    page.querySelector('[data-count]').textContent = `step ${step.toLocaleString('en')}: ${found.length} of `
      + `${here.length} completions, mean reward ${mean}`;
    for (const b of page.querySelectorAll('[data-go]')) b.disabled = !(+field('at').value + +b.dataset.go in steps);
    list.replaceChildren();
    shown = 0;
    grow();
  };
  const turnTo = () => {
    const step = steps[+field('at').value], here = rows.filter(row => row[0] === step), chosen = field('group').value;
    groups = new Map();
    for (const row of here) {
      const of = groups.get(row[1]) || {low: Infinity, high: -Infinity, count: new Map()};
      groups.set(row[1], of);
      if (row[5] === null) continue;
      [of.low, of.high] = [Math.min(of.low, row[5]), Math.max(of.high, row[5])];
      of.count.set(row[5], (of.count.get(row[5]) || 0) + 1);
    }
    const all = make('option', '', `all ${groups.size}`);
    all.value = '';
    field('group').replaceChildren(all);
    for (const group of groups.keys()) {
      const row = here.find(row => row[1] === group), said = plain(prompts[row[3]]);
      const option = make('option', '', `${group + 1}: ${said.length > 60 ? said.slice(0, 60) + '…' : said}`);
      option.value = group;
      field('group').append(option);
    }
    field('group').value = groups.has(+chosen) && chosen !== '' ? chosen : '';
    show();
  };
  field('at').max = steps.length - 1;
  field('at').value = steps.length - 1;
  field('at').addEventListener('input', turnTo);
  for (const button of page.querySelectorAll('[data-go]')) button.addEventListener('click', () => {
    field('at').value = +field('at').value + +button.dataset.go;
    turnTo();
  });
  for (const name of ['group', 'sort', 'which', 'least', 'most', 'words']) field(name).addEventListener('input', show);
  more.addEventListener('click', grow);
  turnTo();
})();
"""


def section(run: RunRecord) -> str:
    """Empty where nothing was written."""
    found = kept(run.completions) if run.completions else Kept()
    if not found.lines:
        return ""
    data = json.dumps(_packed(found), ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    return (
        f'<h2>Completions</h2><section id="completions"><p class="told">{_left_out(found)}</p>{_CONTROLS}</section>'
        f'<script type="application/json" id="completions-data">{data}</script><script>{_SCRIPT}</script>'
    )


def _left_out(found: Kept) -> str:
    """What the page does not have."""
    if len(found.lines) == found.all_lines:
        return f"All {found.all_lines:,} completions of {found.all_steps:,} steps."
    some = ""
    if len(found.steps) < found.all_steps:
        some = f" of {len(found.steps):,} steps among {found.all_steps:,} (the first, the last, and evenly between)"
    return (
        f"{len(found.lines):,} of {found.all_lines:,} completions{some}, so that this page stays small: all of them "
        f"are in {FILE}."
    )


def _packed(found: Kept) -> dict[str, Any]:
    names = list(dict.fromkeys(name for line in found.lines for name in line.get("rewards") or {}))
    prompts: dict[str, int] = {}
    rows = [_row(line, names, prompts) for line in found.lines]
    return {"steps": found.steps, "names": names, "prompts": [json.loads(prompt) for prompt in prompts], "rows": rows}


def _row(line: dict[str, Any], names: Sequence[str], prompts: dict[str, int]) -> list[Any]:
    asked, rewards = json.dumps(_text(line.get("prompt")), ensure_ascii=False), line.get("rewards") or {}
    return [
        *(line.get(name, 0) for name in ("step", "group", "member")), prompts.setdefault(asked, len(prompts)),
        _text(written(line)), _short(line.get("reward")), [_short(rewards.get(name)) for name in names],
        line.get("problems") or 0, *(line.get(name, 0) for name in ("tokens", "finish", "version")),
    ]  # fmt: skip


def _text(said: Any) -> str | list[list[str]]:
    if isinstance(said, list):
        return [[role, shortened(text)] for role, text in turns(said)]
    return shortened(str(said or ""))


def _short(reward: float | None) -> float | None:
    return None if reward is None or reward != reward else float(f"{reward:.6g}")
