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

  // A number opens a card that says which runs it is made of; without this script the links lead to the same facts.
  const element = (tag, text) => Object.assign(document.createElement(tag), text === undefined ? {} : { textContent: text });
  const card = document.getElementById("card");
  const find = (hash) => document.getElementById(decodeURIComponent(hash.slice(1)));
  const reveal = () => {
    const target = location.hash ? find(location.hash) : null;
    for (let node = target; node; node = node.parentElement) if (node.tagName === "DETAILS") node.open = true;
    target?.scrollIntoView({ block: "center" });
  };
  const describe = (target) => {
    const fold = target.closest("details");
    const facts = element("dl");
    const add = (name, from) => {
      const pair = element("div"), value = element("dd");
      value.append(...[...from.childNodes].map((node) => node.cloneNode(true)));
      pair.append(element("dt", name[0].toUpperCase() + name.slice(1)), value);
      facts.append(pair);
    };
    if (target.tagName === "TR") {
      const heads = [...target.closest("table").tHead.rows[0].cells].map((head) => head.firstElementChild.firstChild.textContent.trim());
      [...target.cells].slice(1).forEach((cell, index) => add(heads[index + 1], cell));
    }
    fold.querySelectorAll(":scope > dl > div").forEach((pair) => facts.append(pair.cloneNode(true)));
    const title = fold.querySelector("summary b").textContent;
    return [target.tagName === "TR" ? `${title}, ${target.cells[0].textContent.trim()}` : title, facts];
  };
  const place = (link) => {
    const at = link.getBoundingClientRect(), size = card.getBoundingClientRect();
    const below = at.bottom + size.height + 8 < innerHeight;
    card.style.left = `${Math.max(8, Math.min(at.left, document.documentElement.clientWidth - size.width - 8))}px`;
    card.style.top = `${Math.max(8, below ? at.bottom + 4 : at.top - size.height - 4)}px`;
  };
  const open = (link) => {
    const [title, facts] = describe(find(link.hash));
    const heading = element("h4", title), close = element("button", "×"), more = element("p"), jump = element("a", "All runs of this line");
    close.setAttribute("aria-label", "Close");
    close.addEventListener("click", () => card.hidePopover());
    jump.href = link.hash;
    jump.addEventListener("click", () => card.hidePopover());
    more.append(jump);
    card.setAttribute("aria-label", `Where this number comes from: ${title}`);
    card.replaceChildren(heading, close, facts, more);
    card.showPopover();
    place(link);
    close.focus();
  };
  // The tooltip is made when it is needed: a text for each of thousands of numbers would be most of the page.
  document.addEventListener("mouseover", (event) => {
    const link = event.target.closest("a.from");
    if (!link || link.title) return;
    const [title, facts] = describe(find(link.hash));
    const lines = [...facts.children].map((pair) => `${pair.firstChild.textContent}: ${pair.lastChild.textContent}`);
    link.title = [title, ...lines].join("\n");
  });
  if (card.showPopover) {
    document.addEventListener("click", (event) => {
      const link = event.target.closest("a.from");
      if (!link || event.ctrlKey || event.metaKey || event.shiftKey) return;
      event.preventDefault();
      open(link);
    });
  }
  addEventListener("hashchange", reveal);
  reveal();
