"""The demo: the library's main job on real digits that come with a dependency."""
