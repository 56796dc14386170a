"""An installed Chromium, and scripts that find what a person could not read or name on a page."""

from pathlib import Path

CHROMIUM = next(
    (
        path
        for path in map(Path, ("/usr/bin/chromium", "/usr/bin/chromium-browser", "/usr/bin/google-chrome"))
        if path.exists()
    ),
    None,
)
NAMELESS = """() => [...document.querySelectorAll('button, input, select, textarea, a')].filter((node) =>
  node.offsetParent && !(node.getAttribute('aria-label') || node.labels?.length || node.textContent.trim()))
  .map((node) => node.outerHTML)"""
CONTRAST = """() => {
  const numbers = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((v) => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (node) => {
    for (let at = node; at; at = at.parentElement) {
      const found = numbers(getComputedStyle(at).backgroundColor);
      if ((found[3] ?? 1) === 1) return found;
    }
    return [255, 255, 255];
  };
  const bad = [];
  for (const node of document.querySelectorAll('body *')) {
    const own = [...node.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim());
    if (!own || !node.offsetParent || node.closest(':disabled, .visually-hidden, .skip, i')) continue;
    const [a, b] = [light(numbers(getComputedStyle(node).color)), light(behind(node))].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    if (ratio < 4.5) bad.push(`${node.className} ${node.textContent.slice(0, 20)}: ${ratio.toFixed(2)}`);
  }
  return bad;
}"""
