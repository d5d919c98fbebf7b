"""What importing and asking for help may not do: load JAX, let alone start a backend."""

import subprocess
import sys

import da_jax


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout


def test_importing_loads_no_jax_and_names_come_lazily():
    assert run("import sys, da_jax; print('jax' in sys.modules)").strip() == "False"
    code = "import sys, da_jax; da_jax.LLM; print('jax' in sys.modules)"
    assert run(code).strip() == "True"


def test_importing_everything_starts_no_backend():
    code = (
        "import da_jax, jax\n"
        "for name in da_jax.__all__: getattr(da_jax, name)\n"
        "import da_jax.cli.generate, da_jax.cli.bench, da_jax.cli.env\n"
        "print(jax._src.xla_bridge.backends_are_initialized())"
    )
    assert run(code).strip() == "False"


def test_help_names_the_commands_without_loading_jax():
    code = (
        "import sys\n"
        "from da_jax.cli.main import app\n"
        "try: app(['--help'])\n"
        "except SystemExit: pass\n"
        "print('JAX', 'jax' in sys.modules)"
    )
    out = run(code)
    assert out.rstrip().endswith("JAX False")
    commands = "generate convert env info bench eval report replay verify roofline"
    assert all(command in out for command in commands.split())


def test_every_public_name_exists():
    for name in da_jax.__all__:
        assert getattr(da_jax, name) is not None
    assert set(da_jax.__all__) <= set(dir(da_jax))
