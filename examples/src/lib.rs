//! The programs beside this file are the content: see the README.
