//! Decides which secrets of slots are read, and what becomes of a slot whose secret can't be: it alone is refused, so that
//! no place that is down keeps anybody from revoking another secret (CRD-8).

use std::collections::BTreeMap;
use std::fmt::Display;
use std::path::Path;
use std::sync::Arc;
use std::thread;

use iop_edge_core::catalog::{CredentialForm, CredentialSource, SlotSecret};

use super::{SlotRecord, SlotStatusConfig};
use crate::config::secret::SecretReference;

/// Secrets that are read at once: programs may take their time.
const AT_ONCE: usize = 16;

/// The secrets of the slots that are enabled. Prints none of them.
#[derive(Debug, Clone, Default)]
pub struct Secrets {
    loaded: BTreeMap<String, Loaded>,
    missing: Vec<Missing>,
}

#[derive(Debug, Clone)]
struct Loaded {
    reference: String,
    revision: u64,
    source: Arc<dyn CredentialSource>,
}

/// A slot whose secret can't be loaded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Missing {
    /// Its name.
    pub slot: String,
    /// Why, without anything of what is there.
    pub why: String,
    /// The check of the config has told it with its line.
    pub is_file: bool,
}

impl Display for Missing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { slot, why, is_file: _ } = self;
        write!(
            f,
            "credential slot {}: {why}; requests that need it are refused until it can be loaded",
            slot.escape_debug()
        )
    }
}

impl Secrets {
    /// Reads what is not loaded yet: a slot whose place and revision are as `before` keeps what it has.
    pub(super) fn load(records: &[SlotRecord], base: &Path, before: &Self) -> Self {
        let mut secrets = Self::default();
        let mut wanted = Vec::new();
        for record in records.iter().filter(|record| record.status == SlotStatusConfig::Enabled) {
            match before.loaded.get(&record.name) {
                Some(held) if held.reference == record.secret && held.revision == record.revision => {
                    secrets.loaded.insert(record.name.clone(), held.clone());
                }
                Some(_) | None => wanted.push(record),
            }
        }
        for some in wanted.chunks(AT_ONCE) {
            let read = thread::scope(|scope| {
                let running: Vec<_> = some.iter().map(|record| scope.spawn(|| read(record, base))).collect();
                let broken = || Err("a defect ended the reading of its secret".to_owned());
                running.into_iter().map(|one| one.join().unwrap_or_else(|_| broken())).collect::<Vec<_>>()
            });
            for (record, read) in some.iter().zip(read) {
                secrets.add(record, read);
            }
        }
        secrets
    }

    /// Gives up those that can't stand in what a profile makes of them. `uses` are slots with the forms they are sent in.
    pub(super) fn fit(mut self, uses: &[(&str, &str, CredentialForm)]) -> Self {
        for (slot, profile, form) in uses {
            let Some(held) = self.loaded.get(*slot) else { continue };
            if let Err(error) = held.source.credential(form) {
                self.loaded.remove(*slot);
                let why = format!("its secret can't stand in what profile {} sends: {error}", profile.escape_debug());
                self.missing.push(Missing { slot: (*slot).to_owned(), why, is_file: false });
            }
        }
        self
    }

    fn add(&mut self, record: &SlotRecord, read: Result<SlotSecret, String>) {
        match read {
            Ok(secret) => {
                let (reference, revision) = (record.secret.clone(), record.revision);
                self.loaded.insert(record.name.clone(), Loaded { reference, revision, source: Arc::new(secret) });
            }
            Err(why) => {
                let is_file = matches!(SecretReference::parse(&record.secret), Ok(SecretReference::File(_)));
                self.missing.push(Missing { slot: record.name.clone(), why, is_file });
            }
        }
    }

    /// The secret of a slot, if it is loaded.
    pub(super) fn of(&self, slot: &str) -> Option<Arc<dyn CredentialSource>> {
        self.loaded.get(slot).map(|held| Arc::clone(&held.source))
    }

    /// The slots that are refused until their secrets can be loaded.
    #[must_use]
    pub fn missing(&self) -> &[Missing] {
        &self.missing
    }
}

/// The secret at the place that a slot names.
///
/// # Errors
/// A text for people, without anything of what is there.
pub(crate) fn read(record: &SlotRecord, base: &Path) -> Result<SlotSecret, String> {
    let secret = SlotSecret::new(SecretReference::parse(&record.secret)?.resolve(base)?);
    // Every form takes what a bearer token is made of, and more.
    secret.credential(&CredentialForm::Header("x".to_owned())).map_err(|error| error.to_string())?;
    Ok(secret)
}
