"""Deployment: an adapter and a stream of unlabelled images in, predictions and a state out."""

from ttvd.deploy.inputs import Inputs as Inputs
from ttvd.deploy.inputs import open_inputs as open_inputs
from ttvd.deploy.states import StateFile as StateFile
from ttvd.deploy.stream import BatchResult as BatchResult
from ttvd.deploy.stream import StreamSummary as StreamSummary
from ttvd.deploy.stream import adapt_stream as adapt_stream
