"""The lab's controllers: functions from objects and time to writes, without I/O. Read `controller_manager.py` first."""
