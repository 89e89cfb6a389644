"""The process and its machine: child processes, files, user functions, the terminal. No torch.

process_tree.py     child processes that die with their parent; adopt and end descendants
cleanup_process.py  watchdog that removes folders and kills children after its parent's death
user_code.py        guards the process during a call of a user function
interrupts.py       Ctrl-C that no library can swallow
machine_faults.py   classifies errors of the machine, as opposed to bugs
regular_file.py     opens regular files only, without blocking
freed_memory.py     returns freed memory to the operating system at once
import_speed.py     imports without garbage collection
cache.py            cache folders for artifacts that can be rebuilt
terminal_text.py    escapes control characters in untrusted text
"""
