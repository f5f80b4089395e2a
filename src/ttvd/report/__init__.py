"""Reports of benchmark results: pages, committed documents, tables for papers, and figures.

All of it needs the extra ``report``.

- `document`: the document model; `html` renders it as a page, `export` as Markdown, and tables as LaTeX and CSV too.
- `results`: the numbers of a study; `tables` and `study_figures` turn them into tables and figures.
- `provenance`: the runs, commands, devices and versions behind numbers.
- `study`: the page of a store; `diff`: the page of what changed between two stores.
- `results_folder`: documents and figures that are committed, next to the paper's numbers.
- `figures`: the paper's figures, one module for each kind; the store holds their numbers.
- `charts`, `contact_sheet`, `style`: plot functions, corruptions at a glance, and the style of all figures.
"""
