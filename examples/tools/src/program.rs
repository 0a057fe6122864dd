//! The common part of all programs. It parses the command line, runs the program, and prints a failure in one line.

use std::ffi::OsString;
use std::ops::RangeInclusive;
use std::process::ExitCode;

use clap::Parser;
use clap::error::ErrorKind;

use crate::pingpong::failure::{Ending, Failure};
use crate::pingpong::output::Output;

/// The action that a valid command line requests.
// local: a text
#[derive(Debug)]
pub enum Parsed<C> {
    /// Run the program with these arguments.
    Run(C),
    /// Print this text, which is the help or the version.
    Print(String),
}

/// Runs a program. Returns the exit status of `run`. If `run` fails, or standard output could not
/// be written, prints the failure as one line on standard error, and returns 1.
pub fn main<C: Parser, E: Into<ExitCode>>(
    args: impl IntoIterator<Item = OsString>,
    run: impl FnOnce(C) -> Result<E, Failure>,
) -> ExitCode {
    // The log is off by default, because failures are printed anyway. `RUST_LOG` enables it.
    env_logger::Builder::from_env(env_logger::Env::default().default_filter_or("off")).init();
    let done = match parse(args) {
        Ok(Parsed::Run(cli)) => run(cli).map(E::into),
        Ok(Parsed::Print(text)) => {
            Output::stdout().text(&text);
            Ok(ExitCode::SUCCESS)
        }
        Err(failure) => Err(failure),
    };
    done.and_then(|status| Output::finish().map(|()| status)).unwrap_or_else(|failure| {
        eprintln!("{}: {failure}", C::command().get_name());
        ExitCode::FAILURE
    })
}

/// Parses a command line.
///
/// # Errors
/// The command line is invalid. The text describes the mistake in one line.
pub fn parse<C: Parser>(args: impl IntoIterator<Item = OsString>) -> Result<Parsed<C>, Failure> {
    let args: Vec<_> = args.into_iter().collect();
    #[cfg(feature = "completions")]
    if let Some(script) = crate::completions::wanted(&args, C::command()) {
        return script.map(Parsed::Print);
    }
    let error = match C::try_parse_from(args) {
        Ok(cli) => return Ok(Parsed::Run(cli)),
        Err(error) => error,
    };
    let text = error.render().to_string();
    match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => Ok(Parsed::Print(text)),
        ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            let command = C::command();
            let names: Vec<_> = command.get_subcommands().map(clap::Command::get_name).collect();
            Err(Failure::new(format!("no command: give one of {}; --help explains", names.join(", "))))
        }
        _ => Err(one_line(&text)),
    }
}

/// Parses a number of the command line. `range` has the valid numbers, and `words` describes them for the error.
///
/// # Errors
/// The text is not a number in the range.
pub fn number(text: &str, range: RangeInclusive<f64>, words: &str) -> Result<f64, String> {
    text.parse().ok().filter(|number| range.contains(number)).ok_or_else(|| format!("give {words}"))
}

/// Shortens an error message of clap to its first paragraph and its tip.
fn one_line(message: &str) -> Failure {
    let first = message.split("\n\n").next().unwrap_or(message).trim_start_matches("error: ");
    let tip = message.lines().find_map(|line| line.trim().strip_prefix("tip: "));
    Failure::new(tip.map_or_else(|| format!("{first}; --help explains"), |tip| format!("{first}; {tip}")))
}

impl From<Ending> for ExitCode {
    fn from(ending: Ending) -> Self {
        match ending {
            Ending::Complete => Self::SUCCESS,
            Ending::Interrupted => Self::from(130),
        }
    }
}
