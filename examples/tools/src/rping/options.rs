//! The flags that `rping-server` and `rping-client` share. Their letters are those of `rping`.

use std::time::Duration;

use clap::{ArgAction, Args};
use rdma_reactor::transport::iwarp::CrcPolicy;
use rdma_reactor::{Config, Reactor};

use super::advert;
use crate::pingpong::cli::Provider;
use crate::pingpong::failure::Failure;
use crate::pingpong::interrupt::Interrupt;
use crate::pingpong::output::Output;

/// The flags that `rping-server` and `rping-client` share.
#[derive(Clone, Debug, Args)]
pub struct Options {
    /// The port
    #[arg(short, long, default_value_t = 7174)]
    pub port: u16,
    /// Rounds on each connection; any other number is an error [default: any number]
    #[arg(short = 'C', long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub count: Option<u64>,
    /// Compare every byte with the one that was sent
    #[arg(short = 'V', long)]
    pub verify: bool,
    /// Show each ping
    #[arg(short, long)]
    pub verbose: bool,
    /// Write a summary as one JSON object to standard output, and everything else to standard error
    #[arg(long)]
    pub json: bool,
    /// Fail if the run takes longer than this many seconds
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub timeout: Option<u64>,
    /// RDMA devices (verbs), the embedded provider (iwarp), or whichever exists
    #[arg(long, value_enum, default_value_t = Provider::Auto)]
    pub provider: Provider,
    /// Without the embedded provider's CRC32C
    #[arg(long)]
    pub no_crc: bool,
    /// Print version
    // This flag has no letter, because `rping` uses -V for another flag.
    #[arg(long, action = ArgAction::Version)]
    version: Option<bool>,
}

impl Options {
    /// Makes a reactor that Ctrl-C stops, and sets the timer of `--timeout`.
    ///
    /// # Errors
    /// The provider is not available on this machine.
    pub fn reactor(&self) -> Result<(Reactor, Interrupt), Failure> {
        // The buffers are larger than an advert. So a message that is too long still arrives, and the program can report its wrong length.
        let config = Config::default()
            .provider(self.provider.into())
            .buffer_size(4 * advert::LEN as u32)
            .iwarp(|i| i.crc = if self.no_crc { CrcPolicy::Off } else { CrcPolicy::default() });
        let mut reactor = Reactor::new(config.receive_depth(5).send_depth(4))?;
        let interrupt = Interrupt::on_signals()?;
        interrupt.stops(reactor.handle());
        if let Some(seconds) = self.timeout {
            reactor.context().timers().set(Duration::from_secs(seconds), 0);
        }
        Ok((reactor, interrupt))
    }

    /// Returns the destination of all output except for the JSON summary.
    #[must_use]
    pub fn output(&self) -> Output {
        if self.json { Output::stderr() } else { Output::stdout() }
    }
}
