// A canvas as sharp as the screen, and pointers on it: hover, tap, drag.
function prepare(canvas, height) {
  const width = Math.max(240, Math.floor(canvas.getBoundingClientRect().width) || 240);
  const dense = Math.min(3, window.devicePixelRatio || 1);
  if (canvas.width !== Math.round(width * dense) || canvas.height !== Math.round(height * dense)) {
    canvas.width = Math.round(width * dense);
    canvas.height = Math.round(height * dense);
    canvas.style.height = height + "px";
  }
  const ctx = canvas.getContext("2d");
  ctx.setTransform(dense, 0, 0, dense, 0, 0);
  ctx.clearRect(0, 0, width, height);
  ctx.font = "11px system-ui, sans-serif";
  return { ctx, width, height };
}
function rounded(ctx, x, y, w, h, r) {
  r = Math.max(0, Math.min(r, w / 2, h / 2));
  ctx.beginPath();
  ctx.roundRect(x, y, w, h, r);
}
// One drawing for each frame, however many events ask for it.
function onFrame(draw) {
  let asked = false;
  return () => {
    if (asked) return;
    asked = true;
    requestAnimationFrame(() => { asked = false; draw(); });
  };
}
// `moved(dx, dy, event)` while dragged, `tapped(x, y)` without, `over(x, y)` or `over(null)` for a pointer above.
function pointers(canvas, { moved, tapped, over, zoomed }) {
  let last = null, far = 0;
  const fingers = new Map();
  const at = event => {
    const box = canvas.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  };
  const spread = () => {
    const [a, b] = [...fingers.values()];
    return Math.hypot(a[0] - b[0], a[1] - b[1]);
  };
  canvas.addEventListener("pointerdown", event => {
    fingers.set(event.pointerId, at(event));
    last = at(event);
    far = 0;
    if (event.pointerId > 0) try { canvas.setPointerCapture(event.pointerId); } catch { /* a pointer that is gone */ }
  });
  canvas.addEventListener("pointermove", event => {
    const here = at(event);
    if (!fingers.has(event.pointerId)) { if (over) over(...here); return; }
    if (fingers.size === 2 && zoomed) {
      const before = spread();
      fingers.set(event.pointerId, here);
      zoomed(spread() / Math.max(1, before), here[0]);
      last = here;
      far = 99;
      return;
    }
    fingers.set(event.pointerId, here);
    far += Math.hypot(here[0] - last[0], here[1] - last[1]);
    if (far > 4 && moved) { canvas.classList.add("turning"); moved(here[0] - last[0], here[1] - last[1], event); }
    last = here;
  });
  const up = event => {
    canvas.classList.remove("turning");
    if (fingers.delete(event.pointerId) && event.type === "pointerup" && far <= 4 && tapped) tapped(...at(event));
  };
  canvas.addEventListener("pointerup", up);
  canvas.addEventListener("pointercancel", up);
  canvas.addEventListener("pointerleave", () => { if (!fingers.size && over) over(null); });
}
