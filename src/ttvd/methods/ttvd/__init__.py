"""TTVD: its loss, its answer, its options and its presets."""

from ttvd.methods.ttvd.method import TTVD as TTVD
