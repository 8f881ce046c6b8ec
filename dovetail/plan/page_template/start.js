// Draws everything, and again when the window or its colours change.
by("title").textContent = DATA.title;
by("about").textContent = DATA.about;
by("footer").textContent = "Written by dovetail plan. Times are bounds from the chip's peak rates unless a number says "
  + "otherwise; memory is estimated. This page holds all its data and fetches nothing.";
readTheme();
refresh();
let wide = innerWidth;
addEventListener("resize", onFrame(() => { if (innerWidth !== wide) { wide = innerWidth; refresh(); } }));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change",
  () => { readTheme(); toneCache.clear(); refresh(); });
