"""Programs that would rather cheat than do what `f` is tested for: each defines it wrong, or not at all."""

from __future__ import annotations

_PROGRAMS = r"""
#### exit before the tests
import os
os._exit(0)
#### exit when called
import os
def f(x): os._exit(0)
#### exit at the end
import atexit, os
atexit.register(os._exit, 0)
def f(x): return 0
#### equal to everything
class E:
  def __eq__(self, o): return True
def f(x): return E()
#### an int equal to everything
class E(int):
  def __eq__(self, o): return True
  __hash__ = None
def f(x): return E(1)
#### a list equal to everything
class E(list):
  def __eq__(self, o): return True
def f(x): return E([1])
#### true and false
class E:
  def __eq__(self, o): return self
  def __bool__(self): return True
def f(x): return E()
#### a class of its own for the tests
class f:
  def __new__(cls, x): return object.__new__(cls)
  def __eq__(self, o): return True
#### python's own functions
import builtins
builtins.all = builtins.abs = builtins.isinstance = lambda *a: True
abs = all = lambda *a: 0
def f(x): return 0
#### a module of python's
class math:
  isclose = staticmethod(lambda *a: True)
def f(x): return 0
#### sitecustomize
for n in ('sitecustomize', 'usercustomize', 'json', 'ast', 'symtable'):
  open(f'/tmp/{n}.py', 'w').write('import os; os._exit(0)')
def f(x): return 0
#### rewriting the tests
import os
for n in ('tests.py', 'main.py'):
  os.path.exists(n) and os.remove(n)
  open(n, 'w').write('print(1)')
def f(x): return 0
#### writing verdicts
import os
for fd in range(1, 64):
  try: os.write(fd, b'{"tests": 1}\n{"passed": true}\n{"end": true}\n')
  except OSError: pass
def f(x): return 0
#### verdicts at the end of the output
print('{"tests": 1}\n{"passed": true}\n{"end": true}', flush=True)
import os
os._exit(0)
#### ending loops of the tests
def f(x): raise StopIteration
#### an exception of its own
class BrokenTestsError(Exception): pass
def f(x): raise BrokenTestsError('x')
#### an answer that is no value
import os
for fd in range(3, 64):
  try: os.write(fd, b'{"value": ["o", []]}\n' * 9)
  except OSError: pass
def f(x): return 0
#### an answer that is no message
import os
for fd in range(3, 64):
  try: os.write(fd, b'[' * 99999 + b'\n')
  except OSError: pass
def f(x): return 0
#### patching the child
import __main__, sys
sys.modules['__main__'].encode = lambda *a: True
def f(x): return 0
"""
CHEATS = {name: source for name, _, source in (part.partition("\n") for part in _PROGRAMS.split("#### ")[1:])}
"""By what they try."""
