  // Tables sort by their headings: up, down, and back to the order they came in. Missing values are always last.
  document.querySelectorAll("table").forEach((table) => {
    const heads = [...table.tHead.rows[table.tHead.rows.length - 1].cells];
    const body = table.tBodies[0];
    const given = [...body.rows];
    const number = (text) => (text === "" || isNaN(text) ? null : Number(text));
    const compare = (a, b, sign) => {
      if (a === "" || b === "") return (a === "") - (b === "");
      const [x, y] = [number(a), number(b)];
      if (x !== null && y !== null) return sign * (x - y);
      if (x !== null || y !== null) return x !== null ? -1 : 1;
      return sign * a.localeCompare(b);
    };
    heads.forEach((head, column) => head.firstElementChild.addEventListener("click", () => {
      const next = { ascending: "descending", descending: null }[head.getAttribute("aria-sort")];
      const order = next === undefined ? "ascending" : next;
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      if (order) head.setAttribute("aria-sort", order);
      table.classList.toggle("sorted", Boolean(order));
      const sign = order === "descending" ? -1 : 1;
      const value = (row) => row.cells[column].dataset.value;
      const rows = order ? [...given].sort((r, s) => compare(value(r), value(s), sign)) : given;
      body.append(...rows);
    }));
  });
