// A box above each table in `<div class="filter">`: it leaves the rows that have the words that are typed.
// "deepseek v3" finds DeepSeek-V3 and deepseek_v3: only letters and digits are compared.
document.querySelectorAll(".filter").forEach((place) => {
  const letters = (text) => text.toLowerCase().replace(/[^\p{L}\p{N}]/gu, "");
  const rows = Array.from(place.querySelectorAll("tbody tr"), (row) => [row, letters(row.textContent)]);
  const box = document.createElement("input");
  const count = document.createElement("output");
  const show = () => {
    const wanted = letters(box.value);
    rows.forEach(([row, text]) => { row.hidden = !text.includes(wanted); });
    count.textContent = `${rows.filter(([row]) => !row.hidden).length} of ${rows.length}`;
  };
  box.type = "search";
  box.placeholder = "for example: gemma 3";
  box.setAttribute("aria-label", "Show the rows with these words");
  box.addEventListener("input", show);
  place.prepend(box, count);
  show();
});
