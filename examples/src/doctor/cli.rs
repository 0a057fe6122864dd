//! The command line.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::Parser;
use clap::error::ErrorKind;

use crate::pingpong::failure::Failure;

/// What this machine can do with RDMA, and why not more. Changes nothing.
///
/// Each line is ok, a note (something that is not there and need not be) or a problem, with the command that mends it.
/// Exit status: 0 when connections can be made, 1 when not.
#[derive(Debug, Parser)]
#[command(name = "rdma-doctor", version, about)]
pub struct Cli {
    /// Peers, or own addresses: what leads there, and which provider `auto` takes
    #[arg(value_name = "ADDRESS")]
    pub addresses: Vec<String>,
    /// One JSON object instead of lines
    #[arg(long)]
    pub json: bool,
    /// Look at the files under this directory: for tests
    #[arg(long, value_name = "DIR", default_value = "/", hide = true)]
    pub root: PathBuf,
}

/// A command line that was understood.
#[derive(Debug)]
pub enum Parsed {
    /// Something to do.
    Run(Cli),
    /// Help or a version to print.
    Print(String),
}

impl Cli {
    /// Reads the command line.
    ///
    /// # Errors
    /// What is wrong with it, in one line.
    pub fn read(args: impl IntoIterator<Item = OsString>) -> Result<Parsed, Failure> {
        let error = match Self::try_parse_from(args) {
            Ok(cli) => return Ok(Parsed::Run(cli)),
            Err(error) => error,
        };
        let text = error.render().to_string();
        match error.kind() {
            ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => Ok(Parsed::Print(text)),
            _ => {
                let first = text.split("\n\n").next().unwrap_or(&text).trim_start_matches("error: ");
                Err(Failure::new(format!("{first}; --help explains")))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        use clap::CommandFactory;
        Cli::command().debug_assert();
    }
}
