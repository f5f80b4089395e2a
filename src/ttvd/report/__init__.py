"""Reports: pictures of diagrams, streams and results, and pages that hold them.

Plot functions take data and axes, draw, and return the axes; none of them changes its data or touches global state.
They need the extra ``report``.

- `style`: the one palette and typography of all figures.
- `planes`: diagrams in the plane, features on them, and how features move.
- `curves`: error along a stream, and reliability diagrams.
- `samples`: how the diagrams judge a single image.
- `streams`, `contact_sheet`: which class comes when, and what corruptions look like.
- `page`: one self-contained HTML page.
"""
