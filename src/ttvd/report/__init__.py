"""Reports: pictures of diagrams, streams and results, and pages that hold them.

Plot functions take data and axes, draw, and return the axes; none of them changes its data or touches global state.
They need the extra ``report``.

- `style`: the one palette and typography of all figures.
- `planes`: diagrams in the plane, features on them, and how features move.
- `curves`: error along a stream, and reliability diagrams.
- `samples`: how the diagrams judge a single image.
- `figures`: from the figures of a store, which need no model any more, to exhibits of a page.
- `streams`, `contact_sheet`: which class comes when, and what corruptions look like.
- `page`: what pages are made of, and the demo's; `document`: a long page with chapters.
- `results`: the numbers of a study; `tables`, `comparisons`, `charts`, `pictures`: what is made of them.
- `study_page`: the page of a store, chapters by `study_section`, `provenance` and `gallery`; `diff`: what changed.
- `export`: tables as Markdown, LaTeX and CSV.
- `folder`: results that are committed, made of packed runs: `markdown` and `drawings` of a study, `paper` beside it,
  `main_table` for a README, `vector` for SVG files of few and always the same bytes.
"""
