"""Deep validation of a whole batch, with the tokenizer of a real model, and without one."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from batchyard.engine.prompt_counting import counter as counter_module
from batchyard.engine.prompt_counting.counter import CountedRequest, PromptCounter
from batchyard.errors import InputRefused, SettingsError
from batchyard.lifecycle import BatchStatus
from batchyard.wire import RequestCounts
from tests.steps.conftest import CHAT, Yard, chat_line
