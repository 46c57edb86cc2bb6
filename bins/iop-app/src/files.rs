//! Decides how files with secrets and records are written: for this user only, and never half.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

/// Who may read a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Readers {
    /// Everybody on this machine.
    All,
    /// This user.
    Owner,
}

/// Writes a file that is not there yet. An error leaves nothing there.
pub(crate) fn create(path: &Path, text: &str, readers: Readers) -> io::Result<()> {
    create_by(path, readers, |file| {
        file.write_all(text.as_bytes())?;
        file.sync_all()
    })
}

fn create_by(path: &Path, readers: Readers, write: impl FnOnce(&mut File) -> io::Result<()>) -> io::Result<()> {
    let mut file = open_new(path, readers)?;
    let written = write(&mut file);
    if written.is_err() {
        // Half a file would stand in the way of the next try.
        let _best_effort = fs::remove_file(path);
    }
    written
}

fn open_new(path: &Path, readers: Readers) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.write(true).create_new(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(
        &mut options,
        match readers {
            Readers::All => 0o644,
            Readers::Owner => 0o600,
        },
    );
    #[cfg(not(unix))]
    let _ = readers;
    options.open(path)
}

/// Replaces a file as a whole: whoever reads it has the old content or the new one. A file that is there keeps its owner,
/// group and mode, and a link stays a link: how it was set up is not ours. `readers` is for a new one.
pub(crate) fn replace(path: &Path, text: &str, readers: Readers) -> io::Result<()> {
    let path = &behind_links(path)?;
    let next = beside(path, "new");
    // What an earlier process of this number left behind.
    let _nothing_there = fs::remove_file(&next);
    let written = match fs::metadata(path) {
        Ok(old) => create(&next, text, Readers::Owner).and_then(|()| like(&old, &next)),
        Err(_) => create(&next, text, readers),
    };
    let written = written.and_then(|()| fs::rename(&next, path));
    if written.is_err() {
        let _best_effort = fs::remove_file(&next);
    }
    written
}

/// What is replaced until somebody says that the new file stays: it comes back when this is dropped before.
#[derive(Debug)]
#[must_use = "dropped, it puts the old file back"]
pub(crate) struct Kept {
    path: PathBuf,
    old: Option<PathBuf>,
    stays: bool,
}

impl Kept {
    /// The new file stays.
    pub(crate) fn stays(mut self) {
        self.stays = true;
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        let _best_effort = match &self.old {
            Some(old) if self.stays => fs::remove_file(old),
            Some(old) => fs::rename(old, &self.path),
            None if self.stays => Ok(()),
            None => fs::remove_file(&self.path),
        };
    }
}

/// [`replace`], and the way back.
pub(crate) fn replace_keeping(path: &Path, text: &str, readers: Readers) -> io::Result<Kept> {
    let path = behind_links(path)?;
    let mut kept = Kept { old: None, stays: true, path };
    if kept.path.exists() {
        let old = beside(&kept.path, "old");
        let _nothing_there = fs::remove_file(&old);
        // The same file under a second name, so that what comes back is what was there.
        fs::hard_link(&kept.path, &old)?;
        kept.old = Some(old);
    }
    replace(&kept.path, text, readers)?;
    kept.stays = false;
    Ok(kept)
}

/// A new file, with a mode and an owner of its own whatever was there before, and the way back. `make` leaves nothing when it
/// fails.
pub(crate) fn create_keeping<E: From<io::Error>>(
    path: &Path,
    make: impl FnOnce(&Path) -> Result<(), E>,
) -> Result<Kept, E> {
    if fs::symlink_metadata(path).is_ok_and(|found| found.is_dir()) {
        return Err(io::Error::from(io::ErrorKind::IsADirectory).into());
    }
    let aside = beside(path, "old");
    let _nothing_there = fs::remove_file(&aside);
    let old = match fs::rename(path, &aside) {
        Ok(()) => Some(aside),
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        Err(error) => return Err(error.into()),
    };
    let made = make(path);
    if let (Err(_), Some(old)) = (&made, &old) {
        let _best_effort = fs::rename(old, path);
    }
    made.map(|()| Kept { path: path.to_path_buf(), old, stays: false })
}

/// The file that a link names in the end.
fn behind_links(path: &Path) -> io::Result<PathBuf> {
    match fs::symlink_metadata(path) {
        Ok(found) if found.is_symlink() => fs::canonicalize(path),
        Ok(_) | Err(_) => Ok(path.to_path_buf()),
    }
}

fn beside(path: &Path, what: &str) -> PathBuf {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(format!(".{}.{what}", std::process::id()));
    path.with_file_name(name)
}

/// Gives `next` the owner, group and mode of another file.
#[cfg(unix)]
fn like(old: &fs::Metadata, next: &Path) -> io::Result<()> {
    use std::os::unix::fs::MetadataExt as _;
    let new = fs::metadata(next)?;
    let changed = |old: u32, new: u32| (old != new).then_some(old);
    let (owner, group) = (changed(old.uid(), new.uid()), changed(old.gid(), new.gid()));
    if owner.is_some() || group.is_some() {
        std::os::unix::fs::chown(next, owner, group).map_err(|error| {
            let (owner, group) = (old.uid(), old.gid());
            let message = format!(
                "it belongs to user {owner} and group {group}, and must go on to: run this as that user ({error})"
            );
            io::Error::new(error.kind(), message)
        })?;
    }
    fs::set_permissions(next, old.permissions())
}

#[cfg(not(unix))]
fn like(old: &fs::Metadata, next: &Path) -> io::Result<()> {
    fs::set_permissions(next, old.permissions())
}

/// One change of a directory's files at a time, among those who ask for this. Freed when dropped.
#[derive(Debug)]
pub(crate) struct Turn {
    _directory: Option<File>,
}

/// Waits for its turn.
pub(crate) fn turn(directory: &Path) -> Turn {
    let directory = if directory.as_os_str().is_empty() { PathBuf::from(".") } else { directory.to_path_buf() };
    // Where a directory can't be locked, two operators who change keys in the same moment can lose one change.
    Turn { _directory: File::open(directory).and_then(|directory| directory.lock().map(|()| directory)).ok() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testdir::TestDir;

    #[test]
    fn a_file_is_replaced_whole_and_a_new_one_is_for_this_user_only() {
        // CRD-12
        let dir = TestDir::new();
        let path = dir.path().join("keys.yaml");
        replace(&path, "old", Readers::Owner).unwrap();
        replace(&path, "new", Readers::Owner).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "new");
        #[cfg(unix)]
        assert_eq!(std::os::unix::fs::MetadataExt::mode(&fs::metadata(&path).unwrap()) & 0o777, 0o600);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "nothing is left beside it");
        assert!(create(&path, "x", Readers::Owner).is_err(), "a secret is never written over another file");
        assert!(replace(&dir.path().join("none/x"), "y", Readers::Owner).is_err());
    }

    #[test]
    fn a_write_that_fails_leaves_nothing_and_an_old_file_as_it_was() {
        // BIN-3
        let dir = TestDir::new();
        let (new, old) = (dir.path().join("new"), dir.write("old", "old"));
        let half = |file: &mut File| {
            file.write_all(b"half")?;
            Err(io::Error::from(io::ErrorKind::StorageFull))
        };
        create_by(&new, Readers::Owner, half).unwrap_err();
        assert!(!new.exists());
        create_keeping::<io::Error>(&old, |path| create_by(path, Readers::Owner, half)).unwrap_err();
        create_keeping::<io::Error>(dir.path(), |_| Ok(())).unwrap_err();
        drop(create_keeping::<io::Error>(&new, |path| create(path, "new", Readers::Owner)).unwrap());
        drop(create_keeping::<io::Error>(&old, |path| create(path, "new", Readers::Owner)).unwrap());
        assert_eq!(fs::read_to_string(&old).unwrap(), "old");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "nothing is left beside it");
        create_keeping::<io::Error>(&old, |path| create(path, "new", Readers::Owner)).unwrap().stays();
        assert_eq!((fs::read_to_string(&old).unwrap(), fs::read_dir(dir.path()).unwrap().count()), ("new".into(), 1));
    }

    #[cfg(unix)]
    #[test]
    fn what_is_replaced_keeps_its_owner_its_mode_and_its_link() {
        // CRD-12, BIN-3
        use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, chown, symlink};
        let dir = TestDir::new();
        let (real, link) = (dir.write("real.yaml", "old"), dir.path().join("link.yaml"));
        symlink(&real, &link).unwrap();
        fs::set_permissions(&real, fs::Permissions::from_mode(0o640)).unwrap();
        // Only root may give a file away; for everybody else the rest is tested.
        let _given = chown(&real, Some(12_345), Some(12_346));
        let owner = |path: &Path| fs::metadata(path).map(|found| (found.uid(), found.gid())).unwrap();
        let before = owner(&real);
        replace(&link, "new", Readers::Owner).unwrap();
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!(fs::read_to_string(&real).unwrap(), "new");
        assert_eq!((fs::metadata(&real).unwrap().mode() & 0o777, owner(&real)), (0o640, before));
        symlink(dir.path().join("gone"), dir.path().join("loose")).unwrap();
        assert!(replace(&dir.path().join("loose"), "x", Readers::Owner).is_err(), "a link to nothing stays one");
    }

    #[test]
    fn what_was_replaced_comes_back_unless_the_new_file_stays() {
        // CRD-11
        let dir = TestDir::new();
        let (path, new) = (dir.write("a.key", "old"), dir.path().join("b.key"));
        drop(replace_keeping(&path, "new", Readers::Owner).unwrap());
        drop(replace_keeping(&new, "new", Readers::Owner).unwrap());
        assert!(fs::read_to_string(&path).unwrap() == "old" && !new.exists());
        replace_keeping(&path, "new", Readers::Owner).unwrap().stays();
        replace_keeping(&new, "new", Readers::Owner).unwrap().stays();
        assert_eq!(
            (fs::read_to_string(&path).unwrap(), fs::read_to_string(&new).unwrap()),
            ("new".into(), "new".into())
        );
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2, "nothing is left beside them");
    }
}
