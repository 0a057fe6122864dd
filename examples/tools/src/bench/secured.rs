//! Secured connections: the key files that both sides need, and a client that opens connections sequentially.

use std::fs::{self, File};
use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Instant;

use rdma_reactor::{
    Config, ConnectError, ConnectionId, Context, DisconnectReason, Handler, ProviderChoice, Reactor, Wait,
};

use crate::pingpong::failure::Failure;
use crate::pingpong::job::SPIN;
use crate::secure::SecurityArgs;

use super::pair;

/// The way in which connections are secured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SecurityMode {
    /// Certificates on both sides.
    Tls,
    /// A pre-shared key.
    Psk,
}

/// A directory with the files of `rdma-pingpong keygen`. Dropping this value removes the directory.
#[derive(Debug)]
pub struct KeyFiles(PathBuf);

impl KeyFiles {
    /// Generates the files.
    ///
    /// # Errors
    /// The files cannot be generated.
    pub fn new() -> Result<Self, Failure> {
        let files = Self(std::env::temp_dir().join(format!("rdma-bench.{}", std::process::id())));
        fs::create_dir(&files.0).map_err(|error| Failure::new(format!("{}: {error}", files.0.display())))?;
        #[cfg(feature = "secure")]
        crate::secure::keygen::make(&files.0, &["127.0.0.1".into()])?;
        Ok(files)
    }

    /// Returns the path of the file `name` in this directory.
    #[must_use]
    pub fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// Returns the command-line flags with which a side uses these files. `side` is `server` or `client`.
    #[must_use]
    pub fn flags(&self, mode: SecurityMode, side: &str) -> String {
        let path = |name: &str| self.path(name).display().to_string();
        match mode {
            SecurityMode::Tls => {
                let (certificate, key) = (path(&format!("{side}.pem")), path(&format!("{side}.key")));
                format!("--tls-cert {certificate} --tls-key {key} --tls-ca {}", path("ca.pem"))
            }
            SecurityMode::Psk => format!("--psk-file {}", path("psk")),
        }
    }

    /// Returns a sparse file with `len` zeros, open at its beginning.
    ///
    /// # Errors
    /// A system call failed.
    pub fn zeros(&self, len: u64) -> io::Result<File> {
        let file = File::options().read(true).write(true).create(true).truncate(true).open(self.path("zeros"))?;
        file.set_len(len)?;
        Ok(file)
    }
}

impl Drop for KeyFiles {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir_all(&self.0) {
            log::warn!("{}: {error}", self.0.display());
        }
    }
}

fn reactor(security: &SecurityArgs) -> Result<Reactor, Failure> {
    let config =
        Config::default().provider(ProviderChoice::Iwarp).wait(Wait::Spin(SPIN)).security(security.security()?);
    Reactor::new(config).map_err(Failure::new)
}

struct ConnectionsServer;

impl Handler for ConnectionsServer {}

/// Runs the server, which prints its address and accepts connections until it is killed.
///
/// # Errors
/// The settings cannot be used, or a system call failed.
pub fn serve(security: &SecurityArgs) -> Result<(), Failure> {
    pair::serve(reactor(security)?, &mut ConnectionsServer)
}

/// A client that opens connections sequentially. It closes each connection when that connection is established, and opens the next one when
/// the closed one has ended.
// local: a text
struct ConnectionsClient {
    server: SocketAddr,
    left: u64,
    failure: Option<String>,
}

impl ConnectionsClient {
    fn next(&mut self, cx: &mut Context<'_>) {
        if self.left == 0 {
            return cx.stop();
        }
        self.left -= 1;
        if let Err(error) = cx.connect(self.server) {
            self.fail(cx, &error);
        }
    }

    fn fail(&mut self, cx: &mut Context<'_>, why: &dyn std::fmt::Display) {
        self.failure = Some(why.to_string());
        cx.stop();
    }
}

impl Handler for ConnectionsClient {
    fn on_connect(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        cx.close(conn);
    }

    fn on_connect_error(&mut self, cx: &mut Context<'_>, _: ConnectionId, error: ConnectError) {
        self.fail(cx, &error);
    }

    fn on_disconnect(&mut self, cx: &mut Context<'_>, _: ConnectionId, reason: DisconnectReason) {
        match reason {
            DisconnectReason::Local { .. } => self.next(cx),
            other => self.fail(cx, &other),
        }
    }
}

/// Runs the client. Returns connections per second, from the first request to the end of the last connection.
///
/// # Errors
/// The settings cannot be used, or a connection was not established.
pub fn measure(security: &SecurityArgs, server: SocketAddr, count: u64) -> Result<f64, Failure> {
    let mut reactor = reactor(security)?;
    let mut client = ConnectionsClient { server, left: count, failure: None };
    let started = Instant::now();
    client.next(&mut reactor.context());
    reactor.run(&mut client).map_err(Failure::new)?;
    match client.failure {
        Some(why) => Err(Failure::new(why)),
        None => Ok(count as f64 / started.elapsed().as_secs_f64()),
    }
}
