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

/// Writes a file that is not there yet.
pub(crate) fn create(path: &Path, text: &str, readers: Readers) -> io::Result<()> {
    let mut file = open_new(path, readers)?;
    file.write_all(text.as_bytes())?;
    file.sync_all()
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

/// Replaces a file as a whole: whoever reads it has the old content or the new one.
pub(crate) fn replace(path: &Path, text: &str, readers: Readers) -> io::Result<()> {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(format!(".{}.new", std::process::id()));
    let next = path.with_file_name(name);
    // What an earlier process of this number left behind.
    let _nothing_there = fs::remove_file(&next);
    let written = create(&next, text, readers).and_then(|()| fs::rename(&next, path));
    if written.is_err() {
        let _best_effort = fs::remove_file(&next);
    }
    written
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
    fn a_file_is_replaced_whole_and_for_this_user_only() {
        // CRD-12
        let dir = TestDir::new();
        let path = dir.write("keys.yaml", "old");
        replace(&path, "new", Readers::Owner).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "new");
        #[cfg(unix)]
        assert_eq!(std::os::unix::fs::MetadataExt::mode(&fs::metadata(&path).unwrap()) & 0o777, 0o600);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "nothing is left beside it");
        assert!(create(&path, "x", Readers::Owner).is_err(), "a secret is never written over another file");
        assert!(replace(&dir.path().join("none/x"), "y", Readers::Owner).is_err());
    }
}
