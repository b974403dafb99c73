"""Bugs of a resize that the interleaving explorer must find: see planted_bugs.py."""

from __future__ import annotations

from bug import Bug

MOVING = "src/forebay/core/table/moving.pxd"
MOVER = "src/forebay/core/table/segment_view.pyx"
TABLE = "src/forebay/core/table/table.pyx"

RESIZE_BUGS = [
    Bug(
        "a cell that changes while it is frozen stays as it is",
        MOVING,
        "        while kind_in(seen.tag) <= FOREBAY_KIND_USED and not cas128_acq_rel(&cells[i], seen, frozen(seen)):",
        "        while kind_in(seen.tag) <= FOREBAY_KIND_USED and not cas128_acq_rel(\n"
        "                &cells[i], seen, frozen(seen)) and not {here}:",
    ),
    Bug(
        "a claim is carried on while its cell is frozen",
        MOVING,
        "    if not FOREBAY_KIND_TAT <= kind_in(seen.tag) <= FOREBAY_KIND_USED:",
        "    if {here} and not FOREBAY_KIND_TAT <= kind_in(seen.tag) <= FOREBAY_KIND_USED:\n"
        "        return wanted\n"
        "    if not FOREBAY_KIND_TAT <= kind_in(seen.tag) <= FOREBAY_KIND_USED:",
    ),
    Bug(
        "keys are carried over before all cells are frozen",
        MOVER,
        "    freeze_cells(table.cells, cells_in(table), &header.resize_progress)\n    without_room = carry",
        "    if not {here}:\n        freeze_cells(table.cells, cells_in(table), &header.resize_progress)\n"
        "    without_room = carry",
    ),
    Bug(
        "the new table is published before the keys are in it",
        MOVER,
        "    without_room = carry_cells(",
        "    if {here}:\n        store_release(&header.moved_table, place)\n"
        "        store_release(&header.resize_progress, progress + 2)\n"
        "    without_room = carry_cells(",
    ),
    Bug(
        "cells are frozen before that is announced",
        MOVER,
        "    store_release(&header.resize_progress, progress + 1 + (progress & 1))    # SYNC freeze -> search\n",
        "    if {here}:\n        freeze_cells(table.cells, cells_in(table), &header.resize_progress)\n"
        "    store_release(&header.resize_progress, progress + 1 + (progress & 1))    # SYNC freeze -> search\n",
    ),
    Bug(
        "an insertion doesn't look for a resize after its scan",
        TABLE,
        "    if is_moving(table):    # SYNC freeze -> search\n        cas128",
        "    if is_moving(table) and not {here}:    # SYNC freeze -> search\n        cas128",
    ),
    Bug(
        "an insertion evicts a key while vacancies are frozen",
        TABLE,
        "or is_moving(table)):    # SYNC",
        "or (is_moving(table) and not {here})):    # SYNC",
    ),
    Bug(
        "a refund takes a frozen key for absent",
        TABLE,
        "            if is_moving(table) and follow(table, &probe, tag):    # SYNC freeze -> search\n"
        "                continue\n            return False",
        "            if not {here} and is_moving(table) and follow(table, &probe, tag):    # SYNC freeze -> search\n"
        "                continue\n            return False",
    ),
]
