// A row is [step, group, member, prompt, completion, reward, rewards, problems, tokens, finish, version]; prompts and the
// names of rewards are stored once. A text is a string, or [[role, text], ...].
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
  const plain = said => typeof said === 'string' ? said : said.map(turn => turn.join(': ')).join('\n');
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
