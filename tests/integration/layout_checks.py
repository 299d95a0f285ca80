"""JavaScript that finds what is wrong with how a page looks."""

FAULTS = """
(() => {
  // Where every piece of visible text lies, cut to what its scrolling ancestors show of it.
  const faults = [], boxes = [];
  const cut = (rect, element) => {
    let { left, top, right, bottom } = rect;
    for (let up = element; up && up !== document.body; up = up.parentElement) {
      if (getComputedStyle(up).overflowY === "visible") continue;
      const frame = up.getBoundingClientRect();
      top = Math.max(top, frame.top);
      bottom = Math.min(bottom, frame.bottom);
      left = Math.max(left, frame.left);
      right = Math.min(right, frame.right);
    }
    return { left, top, right, bottom };
  };
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node; (node = walker.nextNode()); ) {
    const parent = node.parentElement;
    if (!node.textContent.trim() || !parent.checkVisibility()) continue;
    if (parent.closest("script, style, noscript")) continue;
    const range = document.createRange();
    range.selectNodeContents(node);
    for (const rect of range.getClientRects()) {
      const box = cut(rect, parent);
      if (box.right - box.left < 1 || box.bottom - box.top < 1) continue;
      const isOutside = rect.left < 0 || rect.right > innerWidth + 0.5;
      if (isOutside) faults.push(`outside: ${node.textContent}`);
      const isBlock = getComputedStyle(parent).display === "block";
      if (isBlock && parent.scrollWidth > parent.clientWidth + 1) {
        faults.push(`wider than its box: ${node.textContent}`);
      }
      boxes.push({ ...box, parent, text: node.textContent.trim() });
    }
  }
  // One pixel less on each side: the boxes of lines touch, their letters do not.
  boxes.sort((a, b) => a.top - b.top);
  boxes.forEach((a, at) => {
    for (let next = at + 1; next < boxes.length && boxes[next].top < a.bottom - 2; next += 1) {
      const b = boxes[next];
      if (a.left < b.right - 2 && b.left < a.right - 2 && b.bottom - 2 > a.top) {
        if (!a.parent.closest(".heading") || !b.parent.closest("button")) {
          faults.push(`"${a.text}" lies on "${b.text}"`);
        }
      }
    }
  });
  if (document.documentElement.scrollWidth > innerWidth) faults.push("the page scrolls sideways");
  return { faults, num_texts: boxes.length };
})()
"""

CONTRASTS = """
(() => {
  // Contrast (WCAG 2) of every text to the background that lies under it.
  const parse = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((v) => v / 255)
    .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, at) => sum + v * [0.2126, 0.7152, 0.0722][at], 0);
  const faint = [];
  for (const element of document.querySelectorAll("body *")) {
    const texts = [...element.childNodes].filter((node) => node.nodeType === Node.TEXT_NODE);
    if (!texts.some((node) => node.textContent.trim()) || !element.checkVisibility()) continue;
    if (element.closest("script, style")) continue;
    let under = element, back = [0, 0, 0, 0];
    for (; under && (back.length === 4 && back[3] === 0); under = under.parentElement) {
      back = parse(getComputedStyle(under).backgroundColor);
    }
    const style = getComputedStyle(element);
    const ink = parse(element.namespaceURI.endsWith("svg") ? style.fill : style.color);
    const [low, high] = [light(ink), light(back)].sort((a, b) => a - b);
    if ((high + 0.05) / (low + 0.05) < 4.5) faint.push(element.textContent);
  }
  return faint;
})()
"""
