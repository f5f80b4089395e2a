"""Images and the order in which they arrive: digits, corruptions and streams."""

from ttvd.data.digits import load_digits_5k as load_digits_5k
from ttvd.data.digits import split_digits as split_digits
