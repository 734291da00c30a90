#!/bin/sh
# Sends ten payments for two accounts, then runs two worker processes with four threads each, until Ctrl-C.
cd "$(dirname "$0")" || exit
python bank.py && exec dramatiq bank --processes 2 --threads 4
