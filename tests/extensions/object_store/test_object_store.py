"""Objects are fetched once, in blocks, within the bound of the cache, and again when the store fails."""

import multiprocessing
import os

import fsspec
import pytest
import stores

from llava_ds.constants import ConfigError, FileChanged
from llava_ds.extensions.object_store import store as object_store
from llava_ds.extensions.object_store.object_cache import PAGE, ObjectCache
from llava_ds.extensions.object_store.store import RemoteFile, identity_of, url_problem
from llava_ds.files.places import files_in, inside, is_file, is_folder, join, matching, open_data, relative_to
from llava_ds.files.reading import blocks_digest, stamp_of


@pytest.fixture
def store(tmp_path, monkeypatch):
    """A folder of the disk that is a store."""
    return stores.prepare(tmp_path, monkeypatch)


def read(url: str) -> bytes:
    with open_data(url) as file:
        return file.read()


def bytes_of(folder) -> int:
    return sum(sizes_in(folder).values())


def sizes_in(folder) -> dict[str, int]:
    files = (f"{at}/{name}" for at, _, names in os.walk(folder) for name in names)
    return {file: -(-os.stat(file).st_size // PAGE) * PAGE for file in files}


def test_an_object_is_fetched_in_blocks_and_once(store, monkeypatch):
    monkeypatch.setattr(object_store, "BLOCK_BYTES", 1000)
    content = os.urandom(4321)
    (store / "a.bin").write_bytes(content)
    url = stores.url_of(store / "a.bin")
    with RemoteFile(url) as file:
        file.seek(3500)
        assert file.read(10) == content[3500:3510]
    assert len(stores.fetched()) == 1
    assert read(url) == content and len(stores.fetched()) == 5
    assert read(url) == content and len(stores.fetched()) == 5
    with RemoteFile(url, 1500, 2000) as part:
        assert part.readall() == content[1500:3500]
    assert blocks_digest(url) == blocks_digest(store / "a.bin")
    assert blocks_digest(url, 7, 100) == blocks_digest(store / "a.bin", 7, 100)
    assert blocks_digest(url, 7, 4100, 0) == blocks_digest(store / "a.bin", 7, 4100, 0)


def test_an_object_that_was_replaced_is_read_again(store):
    (store / "a.bin").write_bytes(b"old")
    url = stores.url_of(store / "a.bin")
    before = stamp_of(url)
    assert read(url) == b"old" and stamp_of(url) == before
    (store / "a.bin").write_bytes(b"new")
    assert read(url) == b"old", "what was checked stays, until it is asked for anew"
    assert stamp_of(url) != before
    assert read(url) == b"new"


def test_an_object_whose_change_could_not_be_told_is_refused(store, monkeypatch):
    (store / "a.bin").write_bytes(b"old")
    url = stores.url_of(store / "a.bin")
    monkeypatch.setattr(object_store, "MARKS", ())  # of a store that has none
    with pytest.raises(OSError, match="no ETag and no modification time: download it"):
        identity_of(url)


def test_an_object_that_changes_between_check_and_use_is_no_other_image(store):
    (store / "a.bin").write_bytes(b"old")
    url = stores.url_of(store / "a.bin")
    identity_of(url)
    (store / "a.bin").write_bytes(b"new")
    with pytest.raises(FileChanged, match="was changed"):
        read(url)


def test_a_store_that_fails_some_times_is_survived(store):
    (store / "a.bin").write_bytes(b"content")
    url = stores.url_of(store / "a.bin")
    stores.state("failures").write_text(str(object_store.TRIES - 1))
    assert read(url) == b"content"
    (store / "b.bin").write_bytes(b"content")
    stores.state("failures").write_text(str(object_store.TRIES))
    with pytest.raises(OSError, match=f"failed {object_store.TRIES} times, .*503 Slow Down"):
        read(stores.url_of(store / "b.bin"))
    with pytest.raises(FileNotFoundError, match="this object does not exist"):
        read(stores.url_of(store / "c.bin"))


def test_a_damaged_entry_is_fetched_again(store, tmp_path):
    (store / "a.bin").write_bytes(b"content")
    url = stores.url_of(store / "a.bin")
    read(url)
    for folder, _, names in os.walk(tmp_path / "cache"):
        for name in names:
            with open(f"{folder}/{name}", "r+b") as file:  # the ledger is damaged, too
                file.write(b"\0")
    assert read(url) == b"content"
    assert len(stores.fetched()) == 2


def test_the_least_recently_used_goes_first(tmp_path):
    cache = ObjectCache(tmp_path, 10 * PAGE)
    keys = [f"{number:02x}" * 8 for number in range(10)]
    for number, key in enumerate(keys):
        cache.put(key, bytes([number]) * 100)
        os.utime(cache._path(key), (1000 + number, 1000 + number))
    assert cache.get(keys[0]) == bytes(100)  # used now
    cache.put("ff" * 8, b"more")
    assert cache.get(keys[1]) is None
    assert all(cache.get(key) for key in (keys[0], *keys[2:], "ff" * 8))
    cache.put("ee" * 8, bytes(10 * PAGE))
    assert cache.get("ee" * 8) is None, "an entry above the bound is not kept, and nothing removed for it"
    assert cache.get(keys[0])


def fill(folder, max_bytes: int, seed: int) -> None:
    cache = ObjectCache(folder, max_bytes)
    for number in range(60):
        cache.put(f"{seed:02x}{number:08x}", os.urandom(3 * PAGE))


def test_several_processes_stay_within_the_bound(tmp_path):
    bound, entry, number = 100 * PAGE, 4 * PAGE, 3
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=fill, args=(tmp_path, bound, seed)) for seed in range(number)]
    for process in processes:
        process.start()
    most, before = 0, {}
    while any(process.is_alive() for process in processes):
        try:
            found = sizes_in(tmp_path)
        except FileNotFoundError:  # renamed or evicted while it was counted
            continue
        # What two walks found was there together between them; one walk may find what was there one after another.
        most, before = max(most, sum(found[file] for file in found.keys() & before.keys()) - PAGE), found
    assert [process.exitcode for process in processes] == [0] * number
    assert 0 < most <= bound + number * entry
    assert bound // 2 < bytes_of(tmp_path) <= bound + number * entry


def test_records_reach_no_object_outside_the_folder():
    root = "s3://bucket/images"
    assert inside(root, "a/./b.jpg") == f"{root}/a/b.jpg"
    assert inside(root, f"{root}/a.jpg") == f"{root}/a.jpg"
    for name in ("../a.jpg", "a/../../b.jpg", "/a.jpg", "s3://other/a.jpg", "s3://bucket/images2/a.jpg",
                 "a::memory://b", "..\\a.jpg", "file:///etc/passwd"):  # fmt: skip
        assert inside(root, name) is None, name
    with pytest.raises(ValueError, match="not a valid key"):
        inside(root, "a\n.jpg")
    assert inside("https://host/x", "a?b#c%2e%2e.jpg") == "https://host/x/a%3Fb%23c%252e%252e.jpg"


def test_what_a_url_needs_is_said(monkeypatch):
    assert "allow_http" in url_problem("https://host/a.json", False)
    assert "fsspec knows no protocol 'nowhere'" in url_problem("nowhere://a", False)
    assert "chains" in url_problem("s3://a/b::memory://c", False)
    assert url_problem("memory://a", False) is None

    def missing(protocol: str):
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec, "get_filesystem_class", missing)
    assert url_problem("s3://bucket/a", False) == " needs a package that is not installed: pip install s3fs"
    with pytest.raises(ConfigError, match="pip install gcsfs"):
        identity_of("gs://bucket/a")


def test_places_of_a_store():
    files = fsspec.filesystem("memory")
    for name in ("a.tar", "b.tar", "deep/c.parquet", ".hidden/d.parquet", "__pycache__/e.tar"):
        files.pipe(f"/places/{name}", b"content")
    assert is_folder("memory://places") and is_file("memory://places/a.tar") and not is_file("memory://places/x")
    assert files_in("memory://places", (".tar",)) == ["memory:///places/a.tar", "memory:///places/b.tar"]
    assert files_in("memory://places", (".parquet",)) == ["memory:///places/deep/c.parquet"]
    assert matching("memory://places/*.tar") == files_in("memory://places", (".tar",))
    assert relative_to("memory:///places/deep/c.parquet", "memory://places") == "deep/c.parquet"
    assert join("s3://a/b", "c.json") == "s3://a/b/c.json" and join("/a", "s3://b/c") == "s3://b/c"
