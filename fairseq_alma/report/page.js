"use strict";

// A click on a column's title sorts the table by it, a second click the other way round; missing values stay last.
for (const table of document.querySelectorAll("table")) {
  const body = table.tBodies[0];
  table.querySelectorAll("th button").forEach((button, column) => {
    button.addEventListener("click", () => {
      const head = button.parentElement;
      const down = head.getAttribute("aria-sort") === "ascending";
      table.querySelectorAll("th").forEach((each) => each.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const value = (row) => row.cells[column].dataset.value;
      const compare = (one, other) => {
        if (one === "" || other === "") return (one === "") - (other === "");
        const order = isNaN(one) || isNaN(other)
          ? one.localeCompare(other, undefined, { numeric: true })
          : Number(one) - Number(other);
        return down ? -order : order;
      };
      body.append(...[...body.rows].sort((one, other) => compare(value(one), value(other))));
    });
  });
}

// Where a table is wider than its place, its right edge is shaded until one has scrolled there.
for (const scroll of document.querySelectorAll(".scroll")) {
  const shade = () => {
    const hidden = scroll.scrollWidth - scroll.clientWidth - scroll.scrollLeft;
    scroll.parentElement.classList.toggle("more", hidden > 2);
  };
  scroll.addEventListener("scroll", shade, { passive: true });
  new ResizeObserver(shade).observe(scroll);
}

// A click on a figure shows it large.
const large = document.getElementById("large");
for (const button of document.querySelectorAll(".enlarge")) {
  button.addEventListener("click", () => {
    const image = button.querySelector("img");
    Object.assign(large.querySelector("img"), { src: image.src, alt: image.alt });
    large.showModal();
  });
}
large.addEventListener("click", () => large.close());
