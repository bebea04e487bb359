"""huggingface-cli with its own parser, and a folder in place of Hugging Face's servers."""

import stat
import sys

TEXT = """#!{python}
import os, shutil, sys
from huggingface_hub.commands import download, huggingface_cli, upload
from huggingface_hub.utils import filter_repo_objects

HUB = os.environ["FAKE_HUB"]

def fetch(repo_id, local_dir, allow_patterns=None, ignore_patterns=None, **_):
    os.makedirs(local_dir, exist_ok=True)
    names = os.listdir(os.path.join(HUB, repo_id))
    for name in filter_repo_objects(names, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns):
        shutil.copy(os.path.join(HUB, repo_id, name), local_dir)
    return local_dir

class Api:
    def create_repo(self, repo_id, **_):
        os.makedirs(os.path.join(HUB, repo_id), exist_ok=True)
        return type("Repo", (), dict(repo_id=repo_id))

    def upload_folder(self, folder_path, repo_id, **_):
        shutil.copytree(folder_path, os.path.join(HUB, repo_id), dirs_exist_ok=True)
        return repo_id

download.snapshot_download = fetch
upload.HfApi = lambda **_: Api()
huggingface_cli.main()
"""


def install(folder):
    """Writes the command below `folder`. Returns the folder of the command, and the variables that it needs."""
    place = folder / "fake-hub"
    place.mkdir()
    command = place / "huggingface-cli"
    command.write_text(TEXT.replace("{python}", sys.executable))
    command.chmod(command.stat().st_mode | stat.S_IXUSR)
    return place, {"FAKE_HUB": str(folder / "hub")}
