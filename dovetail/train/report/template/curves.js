// Show the values at the pointer. A chart's points are in its data-points.
for (const svg of document.querySelectorAll('svg.chart[data-points]')) {
  const {left, right, low, high, width, series} = JSON.parse(svg.dataset.points);
  const cursor = svg.querySelector('.cursor'), values = svg.querySelector('.values'), names = svg.querySelector('.names');
  const see = on => { for (const e of [cursor, values]) e.style.visibility = on ? 'visible' : 'hidden';
                      names.style.visibility = on ? 'hidden' : 'visible'; };
  svg.addEventListener('pointerleave', () => see(false));
  svg.addEventListener('pointermove', event => {
    const at = (event.clientX - svg.getBoundingClientRect().left) * width / svg.getBoundingClientRect().width;
    if (at < left || at > right) return see(false);
    const x = low + (at - left) / (right - left) * (high - low);
    const near = p => p.reduce((a, b) => Math.abs(b[0] - x) < Math.abs(a[0] - x) ? b : a);
    const found = series.map(([name, p]) => [name, near(p)]);
    const px = left + (found[0][1][0] - low) / (high - low) * (right - left);
    cursor.setAttribute('x1', px); cursor.setAttribute('x2', px);
    values.textContent = 'step ' + found[0][1][0] + ': ' + found.map(([name, p]) => name + ' ' + p[1]).join(', ');
    see(true);
  });
}
