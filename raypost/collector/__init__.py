"""Collecting without a trainer: `raypost.collect`, and the Collector it makes."""

from raypost.collector.build import collect
from raypost.collector.collector import Collector
from raypost.collector.dialog_turn import DialogTurn

__all__ = ["Collector", "DialogTurn", "collect"]
