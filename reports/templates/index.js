"use strict";
(() => {
  const one = (selector) => document.querySelector(selector);
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];
  const filters = one("#filters"), text = one("#text"), area = one("#area"), device = one("#device"), strange = one("#strange");
  const boxes = all("[name=verdict]", filters);
  const rows = all(".claim").map((node) => ({
    node,
    area: node.parentElement.dataset.area,
    text: node.firstElementChild.querySelector(".name").textContent.toLowerCase(),
    cells: all(".cell", node.firstElementChild).map((cell) => [cell.dataset.v, "x" in cell.dataset]),
  }));

  const fits = (row, words, verdicts) => {
    if (area.value && row.area !== area.value) return false;
    if (!words.every((word) => row.text.includes(word))) return false;
    const cells = device.value === "" ? row.cells : [row.cells[Number(device.value)]];
    return cells.some(([verdict, odd]) => (verdict || device.value === "") && (!verdicts.size || verdicts.has(verdict)) && (!strange.checked || odd));
  };
  const filter = () => {
    const words = text.value.toLowerCase().split(/\s+/).filter(Boolean);
    const verdicts = new Set(boxes.filter((box) => box.checked).map((box) => box.value));
    let left = 0;
    const open = new Set();
    for (const row of rows) {
      const shown = fits(row, words, verdicts);
      row.node.hidden = !shown;
      left += shown;
      if (shown) open.add(row.area);
    }
    for (const part of all(".area")) part.hidden = !open.has(part.dataset.area);
    one("#left").textContent = `${left} of ${rows.length} claims`;
    one("#none").hidden = left > 0;
    remember(verdicts);
  };
  const remember = (verdicts) => {
    const asked = new URLSearchParams();
    if (text.value) asked.set("text", text.value);
    if (area.value) asked.set("area", area.value);
    if (device.value !== "") asked.set("device", device.selectedOptions[0].textContent);
    if (verdicts.size) asked.set("verdict", [...verdicts].join(","));
    if (strange.checked) asked.set("unexpected", "1");
    const query = asked.toString();
    try { history.replaceState(null, "", `${location.pathname}${query && `?${query}`}${location.hash}`); } catch { /* not from a file in this browser */ }
  };
  const recall = () => {
    const asked = new URLSearchParams(location.search);
    text.value = asked.get("text") || "";
    if (all("option", area).some((option) => option.value === asked.get("area"))) area.value = asked.get("area");
    for (const option of all("option", device)) if (option.textContent === asked.get("device")) device.value = option.value;
    const verdicts = (asked.get("verdict") || "").split(",");
    for (const box of boxes) box.checked = verdicts.includes(box.value);
    strange.checked = asked.get("unexpected") === "1";
  };

  const reveal = () => {
    let name = location.hash.slice(1);
    try { name = decodeURIComponent(name); } catch { /* it is meant as it stands */ }
    const target = document.getElementById(name);
    const claim = target && target.closest(".claim");
    if (!claim) return;
    if (claim.hidden) { filters.reset(); filter(); }
    for (let part = claim; part; part = part.parentElement.closest("details")) part.open = true;
    claim.firstElementChild.scrollIntoView({ block: "start" });
    claim.firstElementChild.focus({ preventScroll: true });
  };

  const say = (what) => { one("#told").textContent = ""; requestAnimationFrame(() => { one("#told").textContent = what; }); };
  const copy = async (source, button) => {
    try { await navigator.clipboard.writeText(source); } catch {
      const area = document.createElement("textarea");
      area.value = source; area.className = "sr"; document.body.append(area); area.select();
      document.execCommand("copy"); area.remove(); button.focus();
    }
    button.textContent = "Copied"; say("Copied");
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  };
  const dress = (claim) => {
    if (claim.dataset.dressed) return;
    claim.dataset.dressed = "1";
    for (const source of all(".script, .again code", claim)) {
      const button = document.createElement("button");
      button.type = "button"; button.className = "copy"; button.textContent = "Copy";
      button.setAttribute("aria-label", source.matches("pre") ? "Copy the script" : "Copy the command");
      const content = source.textContent;
      button.addEventListener("click", () => copy(content, button));
      if (source.matches("pre")) source.before(button); else { button.style.cssFloat = "none"; source.after(button); }
    }
  };

  const step = (by) => {
    const heads = rows.filter((row) => !row.node.hidden && row.node.parentElement.open).map((row) => row.node.firstElementChild);
    const here = heads.indexOf(document.activeElement && document.activeElement.closest("summary"));
    const next = heads[here < 0 ? (by > 0 ? 0 : heads.length - 1) : Math.min(heads.length - 1, Math.max(0, here + by))];
    if (next) { next.focus(); next.scrollIntoView({ block: "nearest" }); }
  };
  const keys = (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "Escape") { filters.reset(); filter(); return; }
    if (event.target.matches("input, select, textarea")) return;
    if (event.key === "/") { event.preventDefault(); text.focus(); }
    if (event.key === "j" || event.key === "k") step(event.key === "j" ? 1 : -1);
  };

  filters.hidden = false;
  filters.addEventListener("input", filter);
  filters.addEventListener("reset", () => setTimeout(filter));
  filters.addEventListener("submit", (event) => event.preventDefault());
  one("#fold").addEventListener("click", (event) => {
    const closing = all(".area").some((part) => part.open);
    for (const part of all(".area")) part.open = !closing;
    event.target.textContent = closing ? "Unfold areas" : "Fold areas";
  });
  document.addEventListener("toggle", (event) => { if (event.target.matches(".claim") && event.target.open) dress(event.target); }, true);
  document.addEventListener("keydown", keys);
  addEventListener("hashchange", reveal);
  recall();
  filter();
  reveal();
})();
